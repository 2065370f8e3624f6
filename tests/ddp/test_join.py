"""``join``: errors. The catalogue of scenarios has trainings beside eager DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401 - it adds the flag
from testing import models

RUN = Callable[..., list[Any]]


def train(steps: int, **options: Any) -> Iterator[None]:
    """So many steps on this rank, joined with the others; yields after each."""
    ddp = DistributedDataParallel(models.mlp())
    compiled = torch.compile(ddp)
    with ddp.join(**options):
        for step in range(steps):
            compiled(torch.full((4, models.WIDTH), float(step))).sum().backward()
            yield


def test_an_error_where_one_runs_out_first(run_on_ranks: RUN) -> None:
    ended, warned = run_on_ranks(2, words_of_error)
    assert "Rank 0 exhausted all inputs" in ended
    assert "at least one rank that exhausted inputs" in warned


def words_of_error() -> str:
    """What a training under the flag raises."""
    with torch._inductor.config.patch(ddp_fusion="concat"), pytest.raises(RuntimeError) as caught:
        list(train(1 + 2 * dist.get_rank(), throw_on_early_termination=True))
    return str(caught.value)


class Fails(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def test_an_error_reaches_those_without_inputs(run_on_ranks: RUN) -> None:
    ended, failed = run_on_ranks(2, fail_without_others)
    assert failed == "no gradient today"
    assert "rank 1 cannot finish its backward: ValueError: no gradient today" in ended


def fail_without_others() -> str:
    """What a rank raises when the one with inputs fails in its first backward."""

    def run() -> None:
        group = dist.new_group()
        ddp = DistributedDataParallel(models.mlp(), process_group=group)
        compiled = torch.compile(ddp)
        with ddp.join():
            if dist.get_rank() == 1:
                output = Fails.apply(compiled(torch.ones(4, models.WIDTH)))
                dist.barrier()
                output.sum().backward()
            else:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
                dist.barrier()

    with (
        torch._inductor.config.patch(ddp_fusion="concat"),
        pytest.raises((ValueError, RuntimeError)) as caught,
    ):
        run()
    return str(caught.value)
