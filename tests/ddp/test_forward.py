"""The steps of a managed module's forward around the wrapped module, compiled and uncompiled."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel

from testing.fake_world import fake_world, two_layers

RANGE = "DistributedDataParallel.forward"


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    torch._dynamo.reset()
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
