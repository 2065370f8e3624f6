"""What ranks learn of each other's errors and settings, with a reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from fusion_passes.reducer.rank_errors import SettingsDifferError
from testing import models
from testing.registered import registered_by_nobody

RUN = Callable[..., list[Any]]
X = torch.ones(4, models.WIDTH)


def _time_out_soon(group: dist.ProcessGroup) -> None:
    """From here on, for nothing is compiled any more."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)


def _raise(_: Any) -> None:
    raise ZeroDivisionError("a user's error")


def lacks_a_gradient(group: dist.ProcessGroup) -> None:
    """After two steps, rank 1 leaves out a branch that rank 0 takes."""
    ddp = DistributedDataParallel(models.Branching(), process_group=group)
    for step in range(4):
        if step == 2:
            _time_out_soon(group)
        ddp.zero_grad()
        ddp(X, "ab" if step > 1 and dist.get_rank() else "abc").sum().backward()


def fails(group: dist.ProcessGroup) -> None:
    """The third backward of rank 1 raises an error of the user's."""
    ddp = DistributedDataParallel(models.mlp(3), process_group=group)
    for step in range(3):
        ddp.zero_grad()
        output = ddp(X)
        if step == 2:
            _time_out_soon(group)
            if dist.get_rank() == 1:
                output.register_hook(_raise)
        output.sum().backward()


def runs_out_first(group: dist.ProcessGroup) -> None:
    """Rank 0 has one input, rank 1 three."""
    ddp = DistributedDataParallel(models.mlp(), process_group=group)
    with ddp.join(throw_on_early_termination=True):
        for _ in range(1 + 2 * dist.get_rank()):
            ddp(X).sum().backward()


def fails_alone(group: dist.ProcessGroup) -> None:
    """Rank 0 has no inputs, and the first backward of rank 1 raises an error of the user's."""
    ddp = DistributedDataParallel(models.mlp(), process_group=group)
    with ddp.join():
        if dist.get_rank() == 1:
            output = ddp(X)
            output.register_hook(_raise)
            dist.barrier()
            output.sum().backward()
        else:
            _time_out_soon(group)
            dist.barrier()


def error_of(job: Callable[[dist.ProcessGroup], None]) -> str:
    """The error of this rank."""
    with inductor_config.patch(ddp_fusion="concat"):
        try:
            job(dist.new_group())
        except (RuntimeError, ZeroDivisionError) as error:
            return str(error)
    return ""


FAILING = ("rank 1 cannot finish its backward: ZeroDivisionError: a user's error", "a user's error")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        # Eager DDP's error, in the next forward of the rank that lacks a gradient; and why, on the
        # one that waits for it.
        (
            lacks_a_gradient,
            (
                "has failed, since rank 1 cannot finish its backward: it has no gradient of 'c.we",
                "Expected to have finished reduction in the prior iteration",
            ),
        ),
        (fails, FAILING),
        (fails_alone, FAILING),
        (
            runs_out_first,
            ("Rank 0 exhausted all inputs", "at least one rank that exhausted inputs"),
        ),
    ],
)
def test_each_rank_learns_what_is_wrong(
    run_on_ranks: RUN, job: Callable[..., None], words: tuple[str, str]
) -> None:
    for said, word in zip(run_on_ranks(2, error_of, job=job), words, strict=True):
        assert word in said


# --- Settings ------------------------------------------------------------------------------------


def _other_settings(flag: dict[str, Any], options: dict[str, Any]) -> str:
    """The error of this rank, where rank 1 has some options of the flag and of DDP."""
    is_other = dist.get_rank() == 1
    with (
        registered_by_nobody(),
        inductor_config.patch(ddp_fusion=FusionConfig(**(flag if is_other else {}))),
        pytest.raises(SettingsDifferError) as caught,
    ):
        _wrapped(models.mlp(2), **(options if is_other else {}))
    return str(caught.value)


def _wrapped(model: nn.Module, *, delayed: Sequence[str] = (), **options: Any) -> None:
    if delayed:
        named = [(name, model.get_parameter(name)) for name in delayed]
        options["delay_all_reduce_named_params"] = named
        options["param_to_hook_all_reduce"] = named[0][1]
    DistributedDataParallel(model, **options)


@pytest.mark.parametrize(
    ("flag", "options", "words"),
    [
        (
            {"bucket_cap_mb": 2.0},
            {},
            [
                "torch._inductor.config.ddp_fusion must be the same on all ranks",
                '"bucket_cap_mb": null',
                '"bucket_cap_mb": 2.0',
            ],
        ),
        ({"memory": "registered"}, {}, ['"memory": "registered"']),
        (
            {},
            {"find_unused_parameters": True},
            [
                "find_unused_parameters of DistributedDataParallel must be the same on all",
                "false on rank 0",
                "true on rank 1",
            ],
        ),
        (
            {},
            {"delayed": ("0.weight",)},
            [
                "parameters of delay_all_reduce_named_params must be the same",
                '["0.weight"] on rank 1',
            ],
        ),
    ],
    ids=["cap", "memory", "unused", "delayed"],
)
def test_other_settings_are_an_error_on_every_rank_that_names_them(
    run_on_ranks: RUN, flag: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    for text in run_on_ranks(2, _other_settings, flag=flag, options=options):
        assert all(word in text for word in words), text
