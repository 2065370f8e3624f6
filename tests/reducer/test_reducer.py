"""Ranks that run different graphs store their gradients in the same buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fusion_passes import FusionWarning
from fusion_passes.reducer.copies import COMPLEX
from fusion_passes.reducer.reducer import reducer_of
from testing.models import OUTPUTS, Complex, Exact, linear_loss
from testing.processes import RUN
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run
from testing.threads import run_at_once
from tests.reducer.test_unfinished import Heads
from tests.support.beside_eager import beside_eager


def _steps(run: Run, ddp: Any, losses: Callable[[int], list[Tensor]]) -> tuple[list[int], int]:
    """Number of gradients that compiled backwards store in their buckets, in each of five steps
    that launch each bucket once; and the number of gradients."""
    stored = []
    for step in range(5):
        ddp.zero_grad()
        torch.stack(losses(step)).sum().backward()
        run.note_backward(ddp)
        if run.is_fused:
            is_rebuilt = step == 0  # Buckets are rebuilt with a broadcast.
            buckets = reducer_of(ddp).assignment.layout.buckets
            assert run.launches[-1].number == len(buckets) + is_rebuilt
            stored.append(reducer_of(ddp).record.num_stored)
    return stored, len(list(ddp.parameters()))


def other_batch_sizes(run: Run, forwards: int) -> tuple[list[int], int]:
    """In every third step, rank 1 has a batch of one in its last forward, and another graph for
    it."""
    ddp, forward = run.compiled(run.mlp(), bucket_cap_mb=SMALL_MB)

    def losses(step: int) -> list[Tensor]:
        last = 1 if dist.get_rank() == 1 and step % 3 == 2 else 4
        sizes = [*[4] * (forwards - 1), last]
        batches = [run.rows(step, micro, size=size) for micro, size in enumerate(sizes)]
        return [linear_loss(forward, batch) for batch in batches]

    return _steps(run, ddp, losses)


class Breaking(Exact):
    """Exact. Breaks its graph on rank 1. Gradients of these sizes are aligned at any offset, so
    graphs that were compiled before the layout store them whatever else is in their bucket."""

    def __init__(self) -> None:
        layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]
        super().__init__(inner=nn.Linear(8, 16), layers=nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        first, second, relu, third = self.layers
        x = first(self.inner(x).relu())
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return third(relu(second(x)))[:, :OUTPUTS]


def breaks_on_one_rank(run: Run) -> tuple[list[int], int]:
    ddp, forward = run.compiled(Breaking())
    return _steps(run, ddp, lambda step: [linear_loss(forward, run.rows(step))])


@pytest.mark.each_torch
@pytest.mark.parametrize(
    ("train", "arguments"),
    [
        pytest.param(other_batch_sizes, {"forwards": 1}, id="batch-sizes"),
        pytest.param(other_batch_sizes, {"forwards": 3}, id="several-forwards"),
        pytest.param(breaks_on_one_rank, {}, id="breaks"),
    ],
)
def test_ranks_with_other_graphs_store_in_the_same_buckets(
    run_on_ranks: RUN, train: Callable[..., Any], arguments: dict[str, int]
) -> None:
    for stored, gradients in run_on_ranks(2, beside_eager, train=train, flag="concat", **arguments):
        assert stored == [0, *[gradients] * 4], "in the first step there are no buckets yet"


class BreakingComplex(Complex):
    """Exact. Two compiled graphs store complex gradients in one bucket, one of them behind those of
    the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).to(torch.complex64) @ self.first
        torch._dynamo.graph_break()
        out = torch.view_as_real(x @ self.second)
        return out[..., 0] + 2 * out[..., 1]


def complex_in_parts(run: Run) -> set[str]:
    ddp, forward = run.compiled(BreakingComplex())
    for step in range(4):
        ddp.zero_grad()
        linear_loss(forward, run.rows(step)).backward()
        run.note_backward(ddp)
    reducer = reducer_of(ddp) if run.is_fused else None
    return set(reducer.record.why_copied(reducer.parameters.kinds).values()) if reducer else set()


@pytest.mark.each_torch
def test_complex_gradients_behind_others_in_a_bucket(run_on_ranks: RUN) -> None:
    for why in run_on_ranks(2, beside_eager, train=complex_in_parts, flag="concat"):
        assert COMPLEX in why


def _assert_averaged(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> None:
    """Assert that gradients have a dtype, and equal those that are averaged without a reducer."""
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(inputs).sum(), parameters)
    for parameter, local in zip(parameters, expected, strict=True):
        averaged = local.double()
        dist.all_reduce(averaged, dist.ReduceOp.AVG)
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(parameter.grad.double(), averaged, rtol=0, atol=0)


def in_wider_gradients(is_compiled: bool) -> None:
    """bf16 weights whose gradients accumulate in fp32."""
    run = Run(is_fused=is_compiled, dtype=torch.float32, device=torch.device("cpu"))
    model = run.mlp(2).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    with inductor_config.patch(ddp_fusion="concat"):
        ddp, forward = run.compiled(model)
        for step in range(3):
            ddp.zero_grad()
            inputs = run.rows(step)[0].bfloat16() * (1 + 2.0**-7 * dist.get_rank())
            forward(inputs).sum().backward()
            _assert_averaged(model, inputs, torch.float32)
        assert all(b.dtype == torch.float32 for b in reducer_of(ddp).assignment.layout.buckets)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no grad_dtype yet")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_are_sent_in_their_own_dtype(run_on_ranks: RUN, is_compiled: bool) -> None:
    """Eager DDP raises an error here."""
    run_on_ranks(2, in_wider_gradients, is_compiled=is_compiled)


def converted_after_construction(is_compiled: bool) -> None:
    """Autograd gives each parameter a new node, which has no hooks of DDP's."""
    run = Run(is_fused=is_compiled, dtype=torch.float32, device=torch.device("cpu"))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp, forward = run.compiled(run.mlp(2))
        backwards(run, ddp, forward, 2)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            ddp.to(dtype)
            for step in range(2):
                ddp.zero_grad()
                inputs = run.rows(step)[0].to(dtype)
                forward(inputs).sum().backward()
                _assert_averaged(ddp.module, inputs, dtype)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_that_is_converted_is_still_averaged(run_on_ranks: RUN, is_compiled: bool) -> None:
    """Eager DDP does not all-reduce its gradients."""
    run_on_ranks(2, converted_after_construction, is_compiled=is_compiled)


class Recomputed(nn.Module):
    """Everything is in reentrant checkpointing, which the walk does not see."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=True)


def _unseen_backward(total: Tensor) -> None:
    """A backward that the package does not see begin."""
    engine: Any = torch.autograd.Variable._execution_engine
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward((total,), (torch.ones_like(total),), False, False, (), **options)


def in_other_orders_unwalked(is_seen: bool) -> None:
    """Two modules of one group, whose gradients arrive in another order on each rank."""
    run = Run(is_fused=True, dtype=torch.float32, device=torch.device("cpu"))
    models = [run.mlp(depth) for depth in (2, 3)]
    with inductor_config.patch(ddp_fusion="concat"):
        modules = [
            DistributedDataParallel(Recomputed(model) if is_seen else model) for model in models
        ]
    for step in range(3):
        inputs = run.rows(step)[0].requires_grad_(is_seen)
        order = modules if dist.get_rank() == 0 else modules[::-1]
        losses = [ddp(inputs).sum() for ddp in order]
        for ddp in modules:
            ddp.zero_grad()
        (torch.autograd.backward if is_seen else _unseen_backward)(torch.stack(losses).sum())
        for model in models:
            _assert_averaged(model, inputs, torch.float32)


@pytest.mark.parametrize("is_seen", [False, True])
def test_modules_of_one_group_launch_in_one_order_in_backwards_that_are_not_walked(
    run_on_ranks: RUN, is_seen: bool
) -> None:
    """In those that the package does not see begin, and in those of reentrant checkpoints."""
    run_on_ranks(2, in_other_orders_unwalked, is_seen=is_seen)


def forwards_in_threads() -> None:
    """Sequence numbers of autograd nodes start anew in each thread. A second backward, through
    another forward and another output of it, does not continue the first one."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(Heads())
        forward = torch.compile(ddp)
        x = torch.ones(1, 2) * (1 + dist.get_rank())
        sum(output.sum() for output in forward(x)).backward()
        found: list[list[Tensor]] = []
        for _ in range(2):
            run_at_once([lambda: found.append(forward(x))])
        assert found[0][0].grad_fn._sequence_nr() == found[1][0].grad_fn._sequence_nr()
        ddp.zero_grad()
        found[0][0].sum().backward(retain_graph=True)
        ddp.zero_grad()
        with pytest.warns(FusionWarning, match="are not all-reduced"):
            found[1][1].sum().backward()
        local = x.expand(2, 2)
        assert torch.equal(ddp.module.heads[1].weight.grad, local)


def test_a_backward_goes_on_with_forwards_of_its_own(run_on_ranks: RUN) -> None:
    run_on_ranks(2, forwards_in_threads)
