"""For every way to write a training loop, the module's reducer averages while the backward runs,
and compiled backwards store what they can.

One process with a fake group of two ranks: the tests check who stored gradients, and the warnings.
The catalogue of scenarios checks the numbers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusion_passes
from fusion_passes.reducer.reducer import reducer_of
from testing.scenarios.both_ways import noted_warnings
from tests.support.fake_world import fake_world, two_layers

pytestmark = pytest.mark.each_torch


@pytest.fixture(autouse=True)
def _world(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fake process group; the parameter says whether kernels compute anything."""
    torch._dynamo.utils.counters.clear()
    has_kernels = getattr(request, "param", False)
    with fake_world(has_kernels=has_kernels), inductor_config.patch(ddp_fusion=None):
        yield


def _managed(flag: object = "concat", **options: Any) -> DistributedDataParallel:
    inductor_config.ddp_fusion = flag
    return DistributedDataParallel(two_layers(), **options)


def _inputs() -> Tensor:
    return torch.ones(2, 4)


def _steps(ddp: DistributedDataParallel, step: Callable[[], object]) -> list[int]:
    """Number of gradients that compiled backwards store in their buckets, in each of two steps.
    Asserts that there is no warning, and that each backward is averaged and none traced."""
    stored = []
    for number in range(2):
        ddp.zero_grad()
        step()
        assert reducer_of(ddp).steps == number + 1
        stored.append(reducer_of(ddp).record.num_stored)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 0
    report = fusion_passes.report()
    assert report.warnings == ()
    assert {backward.reduced_in for backward in report.backwards} == {"reducer"}
    return stored


IN_PLACE = [0, 4]
"""The first backward has no buckets yet."""
BY_HOOKS = [0, 0]


def _compiled(ddp: DistributedDataParallel, **options: Any) -> Callable[[], object]:
    compiled = torch.compile(ddp, **options)
    return lambda: compiled(_inputs()).sum().backward()


def _inside(ddp: DistributedDataParallel) -> Callable[[], object]:
    return torch.compile(lambda: ddp(_inputs()).sum().backward())


def _in_another_thread(ddp: DistributedDataParallel) -> Callable[[], object]:
    step = _compiled(ddp)

    def run() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    return run


def _with_a_hook_that_dynamo_does_not_trace(ddp: DistributedDataParallel) -> Callable[[], object]:
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(torch._dynamo.disable(lambda _: None))
    return _compiled(ddp)


@pytest.mark.parametrize(
    ("way", "stored"),
    [
        pytest.param(_inside, IN_PLACE, id="backward inside the compiled step"),
        pytest.param(_compiled, IN_PLACE, id="backward outside"),
        pytest.param(_in_another_thread, IN_PLACE, id="in another thread than the flag was set"),
        pytest.param(
            lambda ddp: _compiled(ddp, options={"fallback_by_default": True}),
            BY_HOOKS,
            id="operators that are called and not lowered",
        ),
        pytest.param(
            lambda ddp: _compiled(ddp, backend="aot_eager"), BY_HOOKS, id="another backend"
        ),
        pytest.param(
            lambda ddp: lambda: ddp(_inputs()).sum().backward(create_graph=True),
            BY_HOOKS,
            id="an eager forward, and create_graph",
        ),
        pytest.param(
            _with_a_hook_that_dynamo_does_not_trace, BY_HOOKS, id="hooks that are not traced"
        ),
    ],
)
def test_who_stores_gradients(
    way: Callable[[DistributedDataParallel], Callable[[], object]], stored: list[int]
) -> None:
    ddp = _managed("coalesced")  # The tests below use the other mode.
    assert _steps(ddp, way(ddp)) == stored


def test_gradients_of_create_graph_can_be_differentiated() -> None:
    """Their averages are copied into them, which autograd must not record."""
    ddp = _managed()
    alone = copy.deepcopy(ddp.module)
    second = []
    for model in (ddp, alone):
        model(_inputs()).exp().sum().backward(create_graph=True)
        parameters = list(model.parameters())
        sums = [p.grad.sum() for p in parameters if p.grad is not None]
        second.append(torch.autograd.grad(torch.stack(sums).sum(), parameters))
    torch.testing.assert_close(*second)


def test_a_gradient_in_the_place_of_another_one_is_an_error() -> None:
    """Its average would be copied over that of the other gradient."""
    ddp = _managed()
    first, last = ddp.module[0].weight, ddp.module[1].weight
    node = torch.autograd.graph.get_gradient_edge(first).node
    node.register_hook(lambda *_: setattr(first, "grad", last.grad))
    with pytest.raises(
        RuntimeError, match=r"0\.weight of DDP 0 .* in the place of another gradient"
    ):
        ddp(_inputs()).sum().backward()


def test_step_that_was_decorated_before_the_flag_was_set() -> None:
    holder: list[DistributedDataParallel] = []
    step = torch.compile(lambda: holder[0](_inputs()).sum().backward())
    holder.append(_managed())
    assert _steps(holder[0], step) == IN_PLACE


class _Halved(nn.Module):
    """Its backward fills a tensor of the batch's size instead of saving it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).exp() * torch.full((4, x.shape[0]), 0.5).t()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("_world", [True], indirect=True, ids=["with kernels"])
def test_dynamic_shapes_from_the_cache() -> None:
    """A second start loads forward and backward from AOTAutograd's cache."""
    inductor_config.ddp_fusion = "concat"
    seen: list[list[Any]] = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch.manual_seed(0)
            ddp = DistributedDataParallel(_Halved())
            torch.compile(ddp, dynamic=True)(_inputs()).backward()
            seen.append([parameter.grad for parameter in ddp.parameters()])
        assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] > 0
    cold, warm = seen
    assert all(torch.equal(mine, other) for mine, other in zip(cold, warm, strict=True))


def test_gradients_share_the_memory_of_their_bucket_which_is_freed_with_them() -> None:
    """Checks the statements of docs/buckets.md."""
    ddp = _managed()
    step = _compiled(ddp)
    for _ in range(2):
        step()
        memory = {parameter.grad.untyped_storage() for parameter in ddp.parameters()}
        (bucket,) = {StorageWeakRef(storage) for storage in memory}
        assert {storage.nbytes() for storage in memory} == {(2 * 4 * 4 + 2 * 4) * 4}
        del memory
        ddp.zero_grad()
        assert bucket.expired()


def test_instances_share_a_compiled_forward() -> None:
    for ddp in (_managed(), _managed()):
        assert _steps(ddp, _compiled(ddp)) == IN_PLACE
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_backward_that_reaches_no_managed_parameter_is_left_alone() -> None:
    ddp = _managed()
    torch.compile(ddp)(_inputs()).sum().backward()
    other = two_layers()
    torch.compile(lambda x: other(x).sum().backward())(_inputs())
    other(_inputs()).sum().backward()
    torch.autograd.grad(ddp(_inputs()).sum(), ddp.module[0].weight)
    assert reducer_of(ddp).steps == 1


def test_module_constructed_before_the_flag_is_warned_about_once(tmp_path: Path) -> None:
    dist.destroy_process_group()  # DDP's C++ reducer does not run on a fake group.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    ddp = DistributedDataParallel(two_layers())
    inductor_config.ddp_fusion = "concat"
    step = _compiled(ddp)
    with noted_warnings() as said:
        for _ in range(2):
            step()
    assert len(said) == 1
    assert "constructed before torch._inductor.config.ddp_fusion was set" in said[0]
    assert "Set ddp_fusion before you construct it" in said[0]


# --- Threads, and what may happen meanwhile ------------------------------------------------------


class _Deep(nn.Module):
    """Two layers. Backwards are nested so deeply that autograd runs the second layer's in a thread
    of its own, as it does for all backwards on a GPU; ``between`` is called before the first
    layer's."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between
        self.threads: set[int] = set()
        self.second.weight.register_hook(lambda _: self.threads.add(threading.get_ident()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda _: self.between() and None)
        return self._nested(x, 70)

    def _nested(self, x: Tensor, depth: int) -> Tensor:
        if not depth:
            return self.second(x)
        return cast("Tensor", checkpoint(self._nested, x, depth - 1, use_reentrant=True))


def test_a_backward_in_threads_of_autograds_is_not_ended_by_that_of_another_thread() -> None:
    seen: list[tuple[int, int]] = []

    def train_another() -> None:
        other = threading.Thread(target=lambda: short(_inputs()).sum().backward(), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
        seen.append((reducer_of(short).steps, reducer_of(deep).steps))

    inductor_config.ddp_fusion = "concat"
    deep = DistributedDataParallel(_Deep(train_another))
    short = DistributedDataParallel(nn.Linear(4, 4, bias=False))
    with noted_warnings():
        deep(_inputs()).sum().backward()
    assert threading.get_ident() not in deep.module.threads
    assert seen == [(1, 0)]
    assert reducer_of(deep).steps == 1


def test_modules_may_be_freed_while_another_one_trains() -> None:
    """The garbage collector, which may run at any time, frees modules like this."""
    ddp = _managed()
    victims = [_managed() for _ in range(5)]
    ddp.module[1].weight.register_hook(lambda _: victims.clear())
    compiled = torch.compile(ddp)
    for step in range(2):
        ddp.zero_grad()
        compiled(_inputs()).sum().backward()
        assert reducer_of(ddp).steps == step + 1
    assert not victims
