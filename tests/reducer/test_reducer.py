"""Ranks that run other graphs store their gradients in the same buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusion_passes.reducer.reducer import reducer_of
from testing.models import OUTPUTS, Exact, linear_loss
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.run import Run
from tests.support.beside_eager import beside_eager

RUN = Callable[..., list[Any]]


def _steps(run: Run, ddp: Any, losses: Callable[[int], list[Tensor]]) -> tuple[list[int], int]:
    """How many gradients compiled backwards store in their buckets, in each of five steps, which
    launch each bucket once; and how many there are."""
    stored = []
    for step in range(5):
        ddp.zero_grad()
        torch.stack(losses(step)).sum().backward()
        run.note_backward(ddp)
        if run.is_fused:
            is_rebuilt = step == 0  # By a broadcast.
            assert run.launches[-1].number == len(reducer_of(ddp).layout.buckets) + is_rebuilt
            stored.append(reducer_of(ddp).num_stored)
    return stored, len(list(ddp.parameters()))


def other_batch_sizes(run: Run, forwards: int) -> tuple[list[int], int]:
    """Rank 1 has a batch of one in each third step, in its last forward, and another graph for
    it."""
    ddp, forward = run.compiled(run.mlp(), bucket_cap_mb=SMALL_MB)

    def losses(step: int) -> list[Tensor]:
        last = 1 if dist.get_rank() == 1 and step % 3 == 2 else 4
        sizes = [*[4] * (forwards - 1), last]
        batches = [run.rows(step, micro, size=size) for micro, size in enumerate(sizes)]
        return [linear_loss(forward, batch) for batch in batches]

    return _steps(run, ddp, losses)


class Breaking(Exact):
    """Exact. Breaks its graph on rank 1. Gradients of such sizes are aligned wherever they lie:
    graphs that are compiled before the layout store them whatever else is in their bucket."""

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
