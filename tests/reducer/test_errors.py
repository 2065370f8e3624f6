"""What ranks learn of each other's errors and settings, with a reducer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.rank_errors import SettingsDifferError
from testing import models
from testing.registered import registered_by_nobody
from tests.reducer.test_reducer import flag

RUN = Callable[..., list[Any]]
TIMEOUT = timedelta(seconds=3)


def _lacks_on_one_rank(good_steps: int) -> str:
    """After some steps, rank 1 leaves out a branch that rank 0 takes; the error of this rank."""
    with flag():
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
    with flag():
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


# --- join ----------------------------------------------------------------------------------------


def _runs_out_first() -> str:
    """Rank 0 has one input, rank 1 three; the error of this rank."""
    with flag():
        ddp = DistributedDataParallel(models.mlp())
        try:
            with ddp.join(throw_on_early_termination=True):
                for _ in range(1 + 2 * dist.get_rank()):
                    ddp(torch.ones(4, models.WIDTH)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_an_error_where_one_runs_out_first(run_on_ranks: RUN) -> None:
    ended, warned = run_on_ranks(2, _runs_out_first)
    assert "Rank 0 exhausted all inputs" in ended
    assert "at least one rank that exhausted inputs" in warned


def _fails_alone() -> str:
    """Rank 0 has no inputs, and the first backward of rank 1 raises an error of the user's; the
    error of this rank."""
    with flag():
        group = dist.new_group()
        ddp = DistributedDataParallel(models.mlp(), process_group=group)
        try:
            with ddp.join():
                if dist.get_rank() == 1:
                    output = ddp(torch.ones(4, models.WIDTH))
                    output.register_hook(_raise)
                    dist.barrier()
                    output.sum().backward()
                else:
                    dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
                    dist.barrier()
        except (RuntimeError, ZeroDivisionError) as error:
            return str(error)
    return ""


def test_an_error_reaches_those_without_inputs(run_on_ranks: RUN) -> None:
    ended, failed = run_on_ranks(2, _fails_alone)
    assert failed == "a user's error"
    assert "rank 1 cannot finish its backward: ZeroDivisionError: a user's error" in ended


# --- Settings ------------------------------------------------------------------------------------


def _other_settings(flags: list[dict[str, Any]], options: list[dict[str, Any]]) -> str:
    """The error of this rank, whose options of the flag and of DDP are those of its number."""
    rank = dist.get_rank()
    with (
        registered_by_nobody(),
        flag(**flags[rank]),
        pytest.raises(SettingsDifferError) as caught,
    ):
        DistributedDataParallel(models.mlp(2), **options[rank])
    return str(caught.value)


SAME: list[dict[str, Any]] = [{}, {}]


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        (
            [{"bucket_cap_mb": 1.0}, {"bucket_cap_mb": 2.0}],
            SAME,
            [
                "torch._inductor.config.ddp_fusion must be the same on all ranks",
                '"bucket_cap_mb": 1.0',
                '"bucket_cap_mb": 2.0',
            ],
        ),
        ([{}, {"memory": "registered"}], SAME, ['"memory": "registered"']),
        (
            SAME,
            [{}, {"find_unused_parameters": True}],
            [
                "find_unused_parameters of DistributedDataParallel must be the same on all",
                "false on rank 0",
                "true on rank 1",
            ],
        ),
    ],
    ids=["cap", "memory", "unused"],
)
def test_other_settings_are_an_error_on_every_rank_that_names_them(
    run_on_ranks: RUN,
    flags: list[dict[str, Any]],
    options: list[dict[str, Any]],
    words: list[str],
) -> None:
    for text in run_on_ranks(2, _other_settings, flags=flags, options=options):
        assert all(word in text for word in words), text
