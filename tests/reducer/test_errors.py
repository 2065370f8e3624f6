"""What ranks learn of each other's errors, with a reducer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401 - it adds the flag
from testing import models

RUN = Callable[..., list[Any]]
TIMEOUT = timedelta(seconds=3)


def _lacks_on_one_rank(good_steps: int) -> str:
    """After some steps, rank 1 leaves out a branch that rank 0 takes; the error of this rank."""
    torch._dynamo.reset()
    with inductor_config.patch(ddp_fusion="concat"):
        group = dist.new_group()
        ddp = DistributedDataParallel(models.Branching(), process_group=group)
        for step in range(good_steps + 2):
            is_good = step < good_steps
            if step == good_steps:
                dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
            takes = "abc" if is_good or dist.get_rank() == 0 else "ab"
            ddp.zero_grad()
            try:
                ddp(torch.ones(4, models.WIDTH), takes).sum().backward()
            except RuntimeError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_missing_gradient_is_named_on_the_rank_that_waits(
    run_on_ranks: RUN, good_steps: int
) -> None:
    waiting, lacking = run_on_ranks(2, _lacks_on_one_rank, good_steps=good_steps)
    # Eager DDP's error, in the next forward of the rank that lacks a gradient.
    assert "Expected to have finished reduction in the prior iteration" in lacking
    # And why, on the rank that waits for it.
    assert "under ddp_fusion has failed, since rank 1 cannot finish its backward" in waiting
    assert "it has no gradient of 'c.weight', 'c.bias'" in waiting


def _fails_on_one_rank() -> str:
    """The third backward of rank 1 raises an error of the user's; the error of this rank."""
    torch._dynamo.reset()
    with inductor_config.patch(ddp_fusion="concat"):
        group = dist.new_group()
        ddp = DistributedDataParallel(models.mlp(3), process_group=group)
        for step in range(3):
            ddp.zero_grad()
            output = ddp(torch.ones(4, models.WIDTH))
            if step == 2:
                dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
                if dist.get_rank() == 1:
                    output.register_hook(_raise)
            try:
                output.sum().backward()
            except (RuntimeError, ZeroDivisionError) as error:
                return str(error)
    return ""


def _raise(_: Any) -> None:
    raise ZeroDivisionError("a user's error")


def test_an_error_of_one_rank_is_named_on_the_other(run_on_ranks: RUN) -> None:
    waiting, failing = run_on_ranks(2, _fails_on_one_rank)
    assert failing == "a user's error"
    assert "rank 1 cannot finish its backward: ZeroDivisionError: a user's error" in waiting
