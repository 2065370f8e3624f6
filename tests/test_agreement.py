"""All ranks run the same collectives, or all of them get an error that names the parameters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning, RanksDisagreeError
from fusion_passes.agreement import agree, number_runs, numbers_in, waiting_ranks
from fusion_passes.torch_private import register_process_group, unregister_process_group

RUN = Callable[..., list[Any]]
SECONDS = 5.0
"""The groups' timeout: how long a rank waits for one that does not come."""

COMPILING_SECONDS = 30.0
"""The same where one rank may still compile while the other waits."""


def _group(name: str) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    register_process_group(name, group)
    return group


def _error(function: Callable[[], object]) -> RanksDisagreeError | None:
    try:
        function()
    except RanksDisagreeError as error:
        return error
    return None


@given(st.lists(st.integers(0, 30)))
def test_runs_of_numbers_are_read_as_they_were_written(numbers: list[int]) -> None:
    assert numbers_in(number_runs(numbers)) == numbers


def test_runs_of_numbers_are_short() -> None:
    assert number_runs([*range(9999, -1, -1), 7, 8, 9]) == "9999-0,7-9"
    assert number_runs([4, 5, 4]) == "4-5,4"


# --- Of texts -----------------------------------------------------------------------------------


def same_texts() -> int:
    """Agrees three times, on two texts; returns how many keys the store holds."""
    group = _group("same")
    for text in ("a", "a", "b"):
        agree("same", text)
    keys = sum(
        group.get_group_store().check([f"ddp_fusion/same/{call}/0/verdict"]) for call in (1, 2, 3)
    )
    unregister_process_group("same")
    return keys


def test_ranks_ask_each_other_only_when_something_changes(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, same_texts) == [2, 2]


def other_texts() -> tuple[str, dict[int, str], list[int]]:
    rank = dist.get_rank()
    _group("other")
    error = _error(lambda: agree("other", f"text of {rank}"))
    unregister_process_group("other")
    assert error is not None
    return error.module, dict(error.collectives), list(error.silent)


def test_ranks_that_differ_learn_what_each_one_runs(run_on_ranks: RUN) -> None:
    told = ("other", {0: "text of 0", 1: "text of 1"}, [])
    assert run_on_ranks(2, other_texts) == [told, told]


def one_has_changed() -> tuple[dict[int, str], list[int]]:
    """Rank 1 changes its text. Rank 0 does not, and goes on into its collective, which fails."""
    rank, group = dist.get_rank(), _group("changed")
    agree("changed", "old")
    error: RanksDisagreeError | None
    if rank == 0:
        agree("changed", "old")
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|closed"):
            dist.all_reduce(torch.ones(1), group=group)
        error = waiting_ranks(["changed"])
    else:
        error = _error(lambda: agree("changed", "new"))
    unregister_process_group("changed")
    assert error is not None
    return dict(error.collectives), list(error.silent)


def test_a_rank_that_has_not_changed_learns_it_from_its_failed_collective(
    run_on_ranks: RUN,
) -> None:
    first, second = run_on_ranks(2, one_has_changed)
    assert first == ({0: "old", 1: "new"}, [])
    assert second == ({0: "old", 1: "new"}, [0])


def nobody_is_waiting() -> bool:
    _group("quiet")
    agree("quiet", "text")
    found = waiting_ranks(["quiet"])
    unregister_process_group("quiet")
    return found is None


def test_other_failures_stay_what_they_are(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, nobody_is_waiting) == [True, True]


# --- Of backwards -------------------------------------------------------------------------------


class Branch(nn.Module):
    """Its second layer takes part only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        x = self.first(x).relu()
        return self.third(self.second(x) if uses_second else x)


def leaves_out_a_layer(mode: str, from_step: int) -> str:
    """Rank 1 leaves the second layer out, from a step on. Returns the error's text."""
    group = dist.new_group(timeout=timedelta(seconds=COMPILING_SECONDS))
    with inductor_config.patch(ddp_fusion=mode):
        ddp = DistributedDataParallel(Branch(), process_group=group)
        compiled = torch.compile(ddp)
        for step in range(from_step + 1):
            uses_second = step < from_step or dist.get_rank() == 0
            loss = compiled(torch.ones(2, 4), uses_second).sum()
            if step < from_step:
                loss.backward()
        with pytest.raises(RanksDisagreeError) as caught:
            loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("from_step", [0, 2])
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_a_parameter_without_a_gradient_on_one_rank_is_an_error_on_all(
    run_on_ranks: RUN, mode: str, from_step: int
) -> None:
    texts = run_on_ranks(2, leaves_out_a_layer, mode=mode, from_step=from_step)
    for text in texts:
        assert text.startswith("The ranks of DDP 0 (Branch) do not reduce the same gradients")
        assert "'second.weight', 'second.bias': a gradient on rank 0, and none on rank 1." in text
        assert "find_unused_parameters=True" in text
    assert ("Rank 0 did not answer" in texts[1]) == (from_step > 0)


class Either(nn.Module):
    """One of its two layers of a size takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.layers[number](x)


def takes_another_layer(from_step: int) -> str:
    """Hooks run eagerly; rank 1 takes another layer, from a step on. Returns the error's text."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with inductor_config.patch(ddp_fusion="concat"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        ddp = DistributedDataParallel(Either(), process_group=group)

        def train() -> None:
            for step in range(from_step + 2):
                number = int(step >= from_step and rank == 1)
                ddp(torch.ones(2, 4), number).sum().backward(create_graph=True)

        error = _error(train)
    return str(error)


@pytest.mark.parametrize("from_step", [0, 2])
def test_gradients_that_eager_hooks_would_mix_up_are_an_error_on_all(
    run_on_ranks: RUN, from_step: int
) -> None:
    for text in run_on_ranks(2, takes_another_layer, from_step=from_step):
        assert "'layers.0.weight': a gradient on rank 0, and none on rank 1." in text
        assert "'layers.1.weight': a gradient on rank 1, and none on rank 0." in text


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("no gradient on rank 1")


def fails_on_one_rank() -> tuple[str, float]:
    """The first backward fails on rank 1 before anything is launched. Returns the error's text and
    after how many seconds it came, and sees to it that a second try works."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        loss = ddp(torch.ones(2, 4)).sum()
        bad = dist.get_rank() == 1
        start = time.monotonic()
        with pytest.raises((RanksDisagreeError, Exception)) as caught:
            (torch._dynamo.disable(_BadGradient.apply)(loss) if bad else loss).backward()
        seconds = time.monotonic() - start
        dist.barrier()
        ddp(torch.ones(2, 4)).sum().backward()
        assert ddp.module.weight.grad is not None
    return f"{type(caught.value).__name__}: {caught.value}", seconds


def test_a_failure_on_one_rank_is_an_error_on_the_others_at_once(run_on_ranks: RUN) -> None:
    (waiting, seconds), (failing, _) = run_on_ranks(2, fails_on_one_rank)
    assert "no gradient on rank 1" in failing
    assert waiting.startswith("RanksDisagreeError: The backward of DDP 0 (Linear) failed on rank 1")
    assert "no gradient on rank 1" in waiting
    assert seconds < 120, "the group's timeout is 240 s"
