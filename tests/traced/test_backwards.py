"""Backwards that compiled autograd traces: which ones, their launches, and what happens to the
others."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.traced.backwards import FIRST
from testing import models
from testing.models import linear_loss
from testing.processes import RUN
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.loop import backwards as train_steps
from testing.scenarios.run import Run, synced_if
from tests.support.beside_eager import beside_eager
from tests.support.fake_world import one_rank, two_layers

TRACED = FusionConfig(backward_graph="compiled_autograd")


def reasons() -> list[tuple[str, str, int]]:
    """Where the backwards of this process were reduced, the reason, and their number."""
    return [(b.reduced_in, b.because, b.count) for b in fusion_passes.report().backwards]


def batch(step: int, rows: int = 2) -> Tensor:
    return (torch.arange(4.0 * rows).view(rows, 4) + step) / 8


def train(ddp: Any, steps: int = 3, rows: int = 0, **backward: Any) -> list[Tensor | None]:
    """The gradients of several steps, averaged over one rank. Each step has another number of rows,
    unless one is given: with static shapes, each number is compiled."""
    gradients = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(step, rows or step + 2)).square().mean().backward(**backward)
        gradients += [parameter.grad for parameter in ddp.parameters()]
    return gradients


@pytest.fixture(autouse=True)
def _traced_on_one_rank() -> Iterator[None]:
    with inductor_config.patch(ddp_fusion=TRACED), one_rank():
        yield


# --- On one rank ---------------------------------------------------------------------------------


@pytest.mark.each_torch
@inductor_config.patch(fx_graph_cache=False)  # A graph from the cache has no report.
def test_the_first_backward_is_not_traced() -> None:
    """The first averaged backward shows the gradient order. Later backwards launch the layout's
    buckets."""
    expected = train(two_layers(), rows=2)
    ddp = DistributedDataParallel(two_layers())
    torch.testing.assert_close(train(torch.compile(ddp, dynamic=False), rows=2), expected)
    assert reasons() == [("reducer", FIRST, 1), ("compiled_autograd", "", 2)]
    (report, *_) = fusion_passes.reports()
    assert (report.collectives_before, report.collectives_after) == (4, 1)


@inductor_config.patch(fx_graph_cache=False)
def test_a_graph_is_not_for_a_later_module_on_a_group_of_the_same_name() -> None:
    """Its backward looks the same, and its hooks have the same names, but its buckets differ."""
    layer_bytes = 80
    for number, cap_mb in enumerate((layer_bytes / 2**20, 25)):
        if number:
            dist.destroy_process_group()
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=cap_mb)
        train(torch.compile(ddp, dynamic=False), 2, rows=2)
        del ddp
        gc.collect()
    assert [len(report.buckets) for report in fusion_passes.reports()] == [2, 1]


def _managed(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(two_layers(), **options)


def _hooked() -> nn.Module:
    ddp, world = _managed(), dist.group.WORLD
    assert world is not None
    ddp.register_comm_hook(None, lambda _, bucket: default_hooks.allreduce_hook(world, bucket))
    return ddp


class _WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.table(torch.tensor([0, 2]))[0]
        return out


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turns).real


@pytest.mark.parametrize(
    ("run", "because"),
    [
        (
            lambda: train(_managed(find_unused_parameters=True)),
            "find_unused_parameters=True makes ranks exchange",
        ),
        (lambda: train(_hooked()), "a communication hook all-reduces its buckets"),
        (
            lambda: train(_managed(), retain_graph=True),
            "it was called with retain_graph, create_graph or inputs",
        ),
        (
            lambda: train(nn.Sequential(_managed(), nn.Linear(4, 4))),
            "it reaches parameters of no module that was constructed under ddp_fusion",
        ),
        (
            lambda: train(nn.Sequential(_managed(), _managed())),
            "several DistributedDataParallel modules in it share a process group",
        ),
        (lambda: train(DistributedDataParallel(_WithTable())), "it has sparse gradients"),
        (lambda: train(DistributedDataParallel(_Turned())), "it has complex gradients"),
    ],
)
def test_what_a_graph_could_not_launch_alike_is_left_to_reducers(
    run: Callable[[], object], because: str
) -> None:
    run()
    reduced_in, said, count = reasons()[-1]
    assert reduced_in == "reducer"
    assert count >= 2
    assert said.startswith(because)


def test_a_graph_that_breaks_runs_as_it_is_once_and_is_then_left_to_the_reducer() -> None:
    def gradients(model: nn.Module) -> tuple[list[Tensor | None], list[float]]:
        norms: list[float] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: norms.append(grad.norm().item()))
        return train(model), sorted(norms)

    expected = gradients(two_layers())
    ddp = DistributedDataParallel(two_layers())
    with pytest.warns(FusionWarning, match="cannot compile them as one graph") as said:
        torch.testing.assert_close(gradients(ddp), expected)
    assert [item[0] for item in reasons()] == ["reducer", "reducer"]
    assert reasons()[-1][1].startswith("torch cannot compile it as one graph")
    assert len([w for w in said if issubclass(w.category, FusionWarning)]) == 1


@pytest.mark.parametrize(
    "settings",
    [{"use_post_grad_passes": False}, {"disabled_passes": "post_grad_custom_post_pass"}],
    ids=str,
)
def test_a_graph_that_no_pass_would_see_is_left_to_the_reducer(settings: dict[str, Any]) -> None:
    """Its gradients would be reduced one by one, while other ranks launch buckets."""
    expected = train(two_layers())
    with inductor_config.patch(settings):
        ddp = DistributedDataParallel(two_layers())
        with pytest.warns(FusionWarning, match="disabled_passes switches the fusion's pass off"):
            torch.testing.assert_close(train(ddp), expected)
        assert {item[0] for item in reasons()} == {"reducer"}


@pytest.mark.parametrize("how", ["disable", "force_eager"])
def test_what_dynamo_runs_as_it_is_is_averaged_by_the_reducer(how: str) -> None:
    """Then the hooks of the graph run one by one."""
    expected = train(two_layers())
    ddp = DistributedDataParallel(two_layers())
    first = train(ddp, 1)
    set_stance: Any = torch.compiler.set_stance
    with (
        set_stance("force_eager")
        if how == "force_eager"
        else torch._dynamo.config.patch(disable=True)
    ):
        torch.testing.assert_close([*first, *train(ddp)[len(first) :]], expected)
    assert {item[0] for item in reasons()} == {"reducer"}
    assert reducer_of(ddp).steps == 4


class _Jagged(nn.Module):
    """Takes nested tensors, whose sizes compiled autograd cannot read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


def test_what_compiled_autograd_cannot_trace_is_left_to_the_reducer() -> None:
    def gradients(model: nn.Module) -> list[Tensor | None]:
        found = []
        for length in (3, 5, 4):
            given = [batch(0, rows) for rows in (2, length)]
            model.zero_grad()
            out = model(torch.nested.nested_tensor(given, layout=torch.jagged))
            out.values().sum().backward()
            found += [parameter.grad for parameter in model.parameters()]
        return found

    expected = gradients(_Jagged())
    ddp = DistributedDataParallel(_Jagged())
    with pytest.warns(FusionWarning, match="cannot compile them as one graph"):
        torch.testing.assert_close(gradients(ddp), expected)


def test_a_users_error_in_a_traced_backward_is_theirs() -> None:
    ddp = DistributedDataParallel(two_layers())
    train(ddp, 1)
    next(ddp.parameters()).register_hook(lambda _: 1 / 0)
    with pytest.warns(FusionWarning), pytest.raises(ZeroDivisionError):
        train(ddp, 1)


@torch.library.custom_op("fusion_passes_tests::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    """A copy; raises once ``_FAILING`` says so."""
    if _FAILING:
        raise RuntimeError("it fails as the graph runs")
    return x.clone()


@fails.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_FAILING: list[bool] = []


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return fails(gradient)


class _Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(_FailsInBackward.apply(self.first(x)))
        return result


def test_after_a_graph_that_fails_as_it_runs_the_next_forward_raises() -> None:
    """It may have launched some of its buckets, while other ranks have launched all."""
    ddp = DistributedDataParallel(_Failing())
    train(ddp, 2)
    _FAILING.append(True)
    try:
        with pytest.raises(RuntimeError, match="it fails as the graph runs"):
            train(ddp, 1)
    finally:
        _FAILING.clear()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(torch.ones(2, 4))


def test_sizes_that_are_marked_dynamic_may_be_fixed_by_a_traced_backward() -> None:
    ddp = DistributedDataParallel(two_layers())
    model = torch.compile(ddp)
    for size in (3, 5, 5):
        x = batch(0, size)
        torch._dynamo.mark_dynamic(x, 0)
        ddp.zero_grad()
        model(x).square().mean().backward()
        assert x._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]
    assert [item[0] for item in reasons()] == ["reducer", "compiled_autograd"]


def test_backwards_of_several_threads_are_not_traced() -> None:
    ddp = DistributedDataParallel(two_layers())
    train(ddp)
    thread = threading.Thread(target=lambda: torch.ones(2, requires_grad=True).sum().backward())
    thread.start()
    thread.join()
    train(ddp, 1)
    assert reasons()[-1] == ("reducer", "backwards run in several threads", 1)


# --- On two ranks --------------------------------------------------------------------------------


def _breaking(gradient: Tensor) -> Tensor:
    """A hook that breaks the graph."""
    print(end="")
    return gradient


OPTIONS: list[dict[str, Any]] = [
    {"mode": "concat"},
    {"mode": "coalesced"},
    {"mode": "concat", "scaling": "bucket"},
    {"mode": "concat", "reduce_dtype": "bf16"},
    {"mode": "coalesced", "reduce_dtype": "fp16"},
]


def tolerance_eps(options: dict[str, Any]) -> float:
    """One unit of the dtype that is sent, for each rank and for the division."""
    return {"bf16": 2.0**16, "fp16": 2.0**13}.get(options.get("reduce_dtype", ""), 8.0)


def beside_a_rank_that_is_not_traced(run: Run) -> str:
    """Rank 1 has a hook that breaks the graph."""
    ddp, forward = run.compiled(models.mlp(5), bucket_cap_mb=SMALL_MB)
    if dist.get_rank() == 1:
        next(ddp.parameters()).register_hook(_breaking)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        train_steps(run, ddp, forward, 4)
    assert not run.is_fused or len(reducer_of(ddp).assignment.layout.buckets) > 2
    return reasons()[-1][0] if run.is_fused else ""


@pytest.mark.parametrize(
    "options",
    [
        # The hook also sends fp16.
        pytest.param(options, marks=[pytest.mark.nightly] if options == OPTIONS[1] else [])
        for options in OPTIONS
    ],
    ids=str,
)
def test_a_rank_may_trace_what_another_does_not(run_on_ranks: RUN, options: dict[str, Any]) -> None:
    """All ranks send the same buckets, with the elements in the same order, divided alike."""
    flag = FusionConfig(backward_graph="compiled_autograd", **options)
    job = {"train": beside_a_rank_that_is_not_traced, "tolerance_eps": tolerance_eps(options)}
    told = run_on_ranks(2, beside_eager, flag=flag, **job)
    assert told == ["compiled_autograd", "reducer"]


def not_averaged_in_between(run: Run) -> list[tuple[str, str, int]]:
    """The user enables compiled autograd in all steps; some steps run under ``no_sync``."""
    ddp = run.ddp(run.mlp(), bucket_cap_mb=SMALL_MB)

    def backward(number: Tensor, batch: Any) -> None:
        linear_loss(ddp, batch).backward()

    with torch._dynamo.config.patch(compiled_autograd=run.is_fused):
        step = run.compile(backward)
        for number in range(6):
            with synced_if(ddp, number % 2 == 0):
                step(torch.tensor(number), run.rows(number))
            run.note_backward(ddp, synced=number % 2 == 0)
    return reasons()


@pytest.mark.each_torch
def test_a_backward_that_is_not_averaged_launches_nothing(run_on_ranks: RUN) -> None:
    for found in run_on_ranks(2, beside_eager, train=not_averaged_in_between, flag="concat"):
        assert found == [("reducer", FIRST, 1), ("compiled_autograd", "", 2)]
