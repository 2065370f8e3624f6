"""The steps of a managed module's forward around the wrapped module, compiled and uncompiled."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel

from tests.support.fake_world import fake_world, two_layers

RANGE = "DistributedDataParallel.forward"


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world():
        yield


class _Tripled(DistributedDataParallel):
    def forward(self, x):
        return 3 * super().forward(x)


def _ranges(flag: str | None, kind: type[DistributedDataParallel], fullgraph: bool | None) -> int:
    """Number of times that DDP's range is in a profile of two forwards."""
    with inductor_config.patch(ddp_fusion=flag):
        call: Callable[..., Any] = kind(two_layers())
        if fullgraph is not None:
            call = torch.compile(call, backend="eager", fullgraph=fullgraph)
        with profile() as profiled:
            call(torch.ones(2, 4))
            call(torch.ones(2, 4))
    return [event.name for event in profiled.function_events].count(RANGE)


def test_a_full_graph_is_the_first_thing_that_a_process_compiles() -> None:
    """Nothing around the wrapped module is compiled, although it runs for the first time: types
    that Python's typing has not seen before are made in a generator."""
    for forget in typing._cleanups:  # type: ignore[attr-defined]
        forget()
    with inductor_config.patch(ddp_fusion="concat"):
        call = torch.compile(DistributedDataParallel(two_layers()), backend="eager", fullgraph=True)
        call(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("kind", "fullgraph"),
    [
        (DistributedDataParallel, None),
        (DistributedDataParallel, False),
        (DistributedDataParallel, True),
        (_Tripled, None),
    ],
)
def test_profiles_have_ddps_range(
    kind: type[DistributedDataParallel], fullgraph: bool | None
) -> None:
    eager = _ranges(None, kind, None)
    torch._dynamo.reset()
    assert eager == _ranges("concat", kind, fullgraph) == 2


# Where graphs begin


class _Block(nn.Module):
    """A linear layer on either side of another module, with a graph break behind that one."""

    def __init__(self, inner: nn.Module, *, is_broken: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)
        self.is_broken = is_broken

    def forward(self, x):
        x = self.inner(self.first(x))
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.last(x)


def _nested(*breaks: bool) -> nn.Module:
    model: nn.Module = nn.ReLU()
    for is_broken in breaks:
        model = _Block(model, is_broken=is_broken)
    return model


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "unbroken": lambda: _nested(False),
    "broken": lambda: _nested(True, False),
    "broken in two levels": lambda: _nested(True, True),
    # In the forward of such a module, Dynamo begins no graph.
    "of torch": two_layers,
    "of torch, broken": lambda: nn.Sequential(_nested(True)),
}

Wrap: TypeAlias = Callable[[Any], Any]


def _whole(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    return torch.compile(wrap(model), backend="eager")


def _inner(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    return wrap(torch.compile(model, backend="eager"))


def _in_place(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    wrapped = wrap(model)
    wrapped.compile(backend="eager")
    return wrapped


def _blocks(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    for block in model.children():
        block.compile(backend="eager")
    return wrap(model)


def _hooked(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    model.register_forward_hook(lambda *_: None)
    return torch.compile(wrap(model), backend="eager")


def _step(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    wrapped = wrap(model)
    return torch.compile(lambda x: 2 * wrapped(x), backend="eager")


def _twice(wrap: Wrap, model: nn.Module) -> Callable[..., Any]:
    compiled = torch.compile(wrap(model), backend="eager")
    return lambda x: compiled(x) + compiled(x[:2]).sum()


def _frames(compiled: Callable[..., Any], wrap: Wrap, model: str) -> tuple[int, int, int]:
    """Frames of which Dynamo tried to make a graph, graphs, and operators in these."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled(wrap, MODELS[model]())(torch.ones(4, 4))
    stats = counters["stats"]
    return counters["frames"]["total"], stats["unique_graphs"], stats["calls_captured"]


@pytest.mark.each_torch
@pytest.mark.parametrize(
    ("compiled", "model"),
    [
        *((_whole, model) for model in MODELS),
        (_blocks, "broken"),
        *((way, "broken in two levels") for way in (_inner, _in_place, _hooked, _step, _twice)),
    ],
)
def test_graphs_begin_where_they_begin_without_ddp(
    compiled: Callable[..., Any], model: str
) -> None:
    """A graph that began around the model would be traced in vain if the model breaks it."""
    expected = _frames(compiled, lambda model: model, model)
    with inductor_config.patch(ddp_fusion="concat"):
        assert _frames(compiled, DistributedDataParallel, model) == expected
    assert expected[1] > 0


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x):
        return 3 * self.module(x)


def test_a_users_forward_begins_a_graph() -> None:
    """A subclass of DDP computes something in its forward, as any module around a model may."""
    expected = _frames(_whole, _Around, "broken")
    with inductor_config.patch(ddp_fusion="concat"):
        assert _frames(_whole, _Tripled, "broken") == expected


@pytest.mark.parametrize("model", ["unbroken", "of torch"])
def test_a_graph_that_began_elsewhere_goes_on_into_the_model(model: str) -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(MODELS[model]())
        torch.compile(lambda x: 2 * ddp(x), backend="eager", fullgraph=True)(torch.ones(4, 4))


def test_what_a_profiler_range_imports_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first range of a process imports a module (torch 2.13)."""
    with inductor_config.patch(ddp_fusion="concat"):
        expected = _frames(_whole, DistributedDataParallel, "unbroken")
        monkeypatch.setattr(torch.autograd.profiler, "_cupti_monitor_checked", False, raising=False)
        monkeypatch.delitem(sys.modules, "torch.profiler._cupti_monitor", raising=False)
        monkeypatch.delattr(torch.profiler, "_cupti_monitor", raising=False)
        assert _frames(_whole, DistributedDataParallel, "unbroken") == expected


def test_settings_of_ddp_compile_nothing_anew() -> None:
    counter = CompileCounter()
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Sequential(two_layers(), nn.BatchNorm1d(4)))
        compiled = torch.compile(ddp, backend=counter)
        for _ in range(2):
            compiled(torch.ones(2, 4))
            with ddp.no_sync():
                compiled(torch.ones(2, 4))
    assert counter.frame_count == 1


@pytest.mark.parametrize("is_lite", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_compiled_step_broadcasts_buffers_in_their_order(batch: int, is_lite: bool) -> None:
    """Broadcasts of a complex buffer, floating-point buffers, and the number of batches; also if
    operators are called instead of lowered, in any graph. Ranks may have different buffers."""
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Unflatten(1, (2, 4)), norm)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    with inductor_config.patch(ddp_fusion="concat", fallback_by_default=is_lite):
        ddp = DistributedDataParallel(model)
        step = torch.compile(lambda x: ddp(x).square().sum(), fullgraph=True)
        step(torch.ones(batch, 8))
        with profile(record_shapes=True) as profiled:
            step(torch.ones(batch, 8))
    events = profiled.function_events
    sent = [e.input_shapes[0] for e in events if e.name.startswith("_c10d_functional::broadcast")]
    assert sent == [[2], [4], [1]]
