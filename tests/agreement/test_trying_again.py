"""A backward that fails on one rank alone, and what both ranks do next, if they catch that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import RanksDisagreeError
from testing.failing import Switch, failing
from testing.threads import run_at_once

RUN = Callable[..., list[Any]]
SECONDS = 3.0
"""The group's timeout: how long a rank waits for one that does not come."""

COMPILING_SECONDS = 10.0
"""The same where one rank may still compile while the other waits."""


def _attempt(loss: Tensor, fails: bool = False, **options: bool) -> str:
    """What a backward raises. If it is to fail, it does before it reaches a module."""
    try:
        (failing(loss, "no gradient") if fails else loss).backward(**options)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the result.
        return f"{type(error).__name__}: {error}"
    return ""


def two_modules_fail_on_one_rank() -> tuple[str, str, float]:
    """The first backward reaches no module on rank 1, and one of two on rank 0. Returns what both
    backwards have raised, and a gradient of the second."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=60))
    with inductor_config.patch(ddp_fusion="concat"):
        first, last = (
            DistributedDataParallel(nn.Linear(1, 1), process_group=group) for _ in range(2)
        )
        inputs = torch.full((1, 1), 1.0 + 2.0 * rank)
        failed = _attempt(last(first(inputs)).sum(), fails=rank == 1)
        dist.barrier()
        for parameter in (*first.parameters(), *last.parameters()):
            parameter.grad = None
        again = _attempt(last(first(inputs)).sum())
    (bias, weight) = (last.module.bias.grad, first.module.weight.grad)
    assert bias is not None
    assert weight is not None
    return failed, again, float(weight / last.module.weight)


@pytest.mark.timeout(100)
def test_all_modules_of_the_backward_meet_again(run_on_ranks: RUN) -> None:
    (waiting, again, mean), (failing, again_there, mean_there) = run_on_ranks(
        2, two_modules_fail_on_one_rank
    )
    assert failing == "KeyError: 'no gradient'"
    assert "failed on rank 1: KeyError: 'no gradient'" in waiting
    assert (again, again_there) == ("", "")
    assert (mean, mean_there) == (2.0, 2.0)


def fails_where_others_launch(way: str) -> tuple[str, list[str]]:
    """After two steps that were right, the backward of rank 1 fails before anything is launched;
    that rank goes on at once. Returns what it and the next forwards have raised, one of them when
    the others' backward has failed too."""
    options = {"create_graph": way == "by hand"}
    rank = dist.get_rank()
    seconds = SECONDS if way == "by hand" else COMPILING_SECONDS
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
        forward = torch.compile(ddp) if way == "compiled" else ddp
        for _ in range(2):
            assert not _attempt(forward(torch.ones(1, 1)).sum(), **options)
        failed = _attempt(forward(torch.ones(1, 1)).sum(), fails=rank == 1, **options)
        refused = []
        for is_together in (False, False, True):
            if is_together:
                dist.barrier()
            try:
                forward(torch.ones(1, 1))
            except RuntimeError as error:
                refused.append(str(error))
    return failed, refused


@pytest.mark.parametrize(
    "way",
    [*(pytest.param(w, marks=pytest.mark.nightly) for w in ("compiled", "traced")), "by hand"],
)
@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
def test_the_next_step_is_not_averaged_with_one_that_others_are_still_in(
    run_on_ranks: RUN, way: str
) -> None:
    (waiting, here), (failing, there) = run_on_ranks(2, fails_where_others_launch, way=way)
    assert failing == "KeyError: 'no gradient'"
    assert waiting.startswith(RanksDisagreeError.__name__)
    assert "failed on rank 1: KeyError: 'no gradient'" in waiting
    (broken,) = set(here)
    (refused,) = set(there)
    assert "and a collective of its process group has failed" in broken
    assert refused.startswith("Expected to have finished reduction in the prior iteration")
    assert "has failed on this rank, and not on rank 0" in refused


def fails_on_all_ranks() -> tuple[str, str, float]:
    """The second of three backwards fails on both ranks, at different times. Returns what that and
    the last one have raised, and the last one's gradient."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_FailingBetween(), process_group=group)
        ddp.module.fails.seconds = dist.get_rank() / 2
        said = []
        for step in range(3):
            ddp.module.fails.is_on = step == 1
            ddp.zero_grad()
            loss = ddp(torch.full((1, 1), 1.0 + 2.0 * dist.get_rank())).sum()
            said.append(_attempt(loss, create_graph=True))
    gradient = ddp.module.first.weight.grad
    assert gradient is not None
    return said[1], said[2], float(gradient / ddp.module.last.weight)


@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
def test_ranks_that_have_all_failed_go_on(run_on_ranks: RUN) -> None:
    for failed, again, mean in run_on_ranks(2, fails_on_all_ranks):
        assert (failed, again, mean) == ("KeyError: 'no gradient'", "", 2.0)


def leaves_a_step_out() -> list[str]:
    """Rank 0 leaves a step out, for which the other one waits in vain, and both go on with the next
    ones. Returns what each step has raised."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    said = []
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
        for step in range(4):
            if step == 1 and dist.get_rank() == 0:
                said.append("left out")
            else:
                try:
                    ddp(torch.ones(1, 1)).sum().backward(create_graph=True)
                    said.append("")
                except RuntimeError as error:
                    said.append(str(error))
            dist.barrier()
    return said


@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
def test_a_rank_does_not_meet_others_over_a_group_that_has_failed(run_on_ranks: RUN) -> None:
    (_, left_out, told, *here), (right, timed_out, *there) = run_on_ranks(2, leaves_a_step_out)
    assert (left_out, right) == ("left out", "")
    assert "Timed out" in timed_out
    assert "failed on rank 1" in told
    for text in (*here, *there):
        assert "has failed on this rank, and a collective of its process group has failed" in text


def fails_without_others() -> tuple[str, str, float]:
    """On rank 1, a backward under ``no_sync`` fails between two steps. Returns what that and the
    second step have raised, and the second step's gradient."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
        for step in range(2):
            rows = torch.full((1, 1), 1.0 + 2.0 * dist.get_rank())
            ddp.zero_grad()
            again = _attempt(ddp(rows).sum())
            if step == 0:
                with ddp.no_sync():
                    failed = _attempt(ddp(rows).sum(), fails=dist.get_rank() == 1)
    gradient = ddp.module.weight.grad
    assert gradient is not None
    return failed, again, float(gradient)


def test_others_need_not_know_of_a_failure_under_no_sync(run_on_ranks: RUN) -> None:
    (unaware, *here), (failed, *there) = run_on_ranks(2, fails_without_others)
    assert (unaware, failed) == ("", "KeyError: 'no gradient'")
    assert here == there == ["", 2.0]


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


def fails_in_one_thread() -> tuple[str, str]:
    """A backward fails in one thread after another one, over another process group, has got its
    first gradients, and before it gets the others. Returns what each thread has raised."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    has_begun, is_inside, has_failed = (threading.Event() for _ in range(3))
    said = ["", ""]

    def fail_later(gradient: Tensor) -> None:
        has_begun.set()
        assert is_inside.wait(60)
        raise KeyError("no gradient")

    def wait(gradient: Tensor) -> None:
        is_inside.set()
        assert has_failed.wait(60)

    def wait_behind(layer: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(wait)

    with inductor_config.patch(ddp_fusion="concat"):
        bad, good = (DistributedDataParallel(_two_layers(), process_group=g) for g in groups)
        assert not _attempt(good(torch.ones(1, 1)).sum(), create_graph=True)

        def fail() -> None:
            loss = bad(torch.ones(1, 1)).sum()
            loss.register_hook(fail_later)
            said[0] = _attempt(loss, create_graph=True)
            has_failed.set()

        def go_on() -> None:
            assert has_begun.wait(60)
            good.module[0].register_forward_hook(wait_behind)
            said[1] = _attempt(good(torch.ones(1, 1)).sum(), create_graph=True)

        run_at_once([fail, go_on])
    return said[0], said[1]


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_one_thread_leaves_the_others_module_alone(run_on_ranks: RUN) -> None:
    for failed, other in run_on_ranks(2, fails_in_one_thread):
        assert (failed, other) == ("KeyError: 'no gradient'", "")


class _FailingBetween(nn.Module):
    """Two layers. The backward fails between them when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1), nn.Linear(1, 1)
        self.fails = Switch()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(failing(self.first(x), "no gradient", self.fails))
        return y


def fails_while_others_wait(both: bool) -> str:
    """In the first step, rank 1 fails when rank 0 has had a second to come to where the ranks
    meet, or to fail, too. Returns what its backward has raised."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_FailingBetween(), process_group=group)
        ddp.module.fails.is_on = both or dist.get_rank() == 1
        ddp.module.fails.seconds = float(dist.get_rank())
        return _attempt(ddp(torch.ones(1, 1)).sum(), create_graph=True)


@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
@pytest.mark.parametrize("both", [False, True], ids=["one-fails", "both-fail"])
def test_a_users_error_is_not_replaced_by_what_others_do(run_on_ranks: RUN, both: bool) -> None:
    here, there = run_on_ranks(2, fails_while_others_wait, both=both)
    assert there == "KeyError: 'no gradient'"
    if both:
        assert here == there
    else:
        assert "failed on rank 1: KeyError: 'no gradient'" in here


def fails_in_a_changed_graph() -> str:
    """The backward of rank 1 is traced anew since it fails, and keeps its collectives to itself
    for that. Returns what the backward has raised."""
    group = dist.new_group(timeout=timedelta(seconds=COMPILING_SECONDS))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_FailingBetween(), process_group=group)
        assert not _attempt(ddp(torch.ones(1, 1)).sum())
        ddp.module.fails.is_on = dist.get_rank() == 1
        return _attempt(ddp(torch.ones(1, 1)).sum())


def test_a_rank_that_keeps_its_collectives_says_that_it_fails(run_on_ranks: RUN) -> None:
    here, there = run_on_ranks(2, fails_in_a_changed_graph)
    assert there == "KeyError: 'no gradient'"
    assert "failed on rank 1: KeyError: 'no gradient'" in here


def fails_after_the_flag_is_unset() -> tuple[str, str]:
    """Returns what the backward and the next forward have raised."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_FailingBetween(), process_group=group)
    ddp.module.fails.is_on = dist.get_rank() == 1
    failed = _attempt(ddp(torch.ones(1, 1)).sum())
    try:
        ddp(torch.ones(1, 1))
    except RuntimeError as error:
        return failed, str(error)
    return failed, ""


def test_without_the_flag_the_next_forward_raises_as_eager_ddps(run_on_ranks: RUN) -> None:
    (waiting, _), (failing, refused) = run_on_ranks(2, fails_after_the_flag_is_unset)
    assert failing == "KeyError: 'no gradient'"
    assert "Rank 1 did not answer within the process group's timeout." in waiting
    assert refused.startswith("Expected to have finished reduction in the prior iteration")
