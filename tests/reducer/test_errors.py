"""What ranks with a reducer learn of each other's errors and settings."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from fusion_passes import FusionConfig
from fusion_passes.ddp import attachment
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Kinds, Layout, Piece, lay_out
from fusion_passes.reducer import assignment, rank_errors
from fusion_passes.reducer.rank_errors import RanksDisagreeError, SettingsDifferError, meet_ranks
from fusion_passes.reducer.reducer import reducer_of
from testing import models
from testing.processes import RUN
from testing.registered import registered_by_nobody
from testing.threads import run_at_once
from tests.reducer.test_unfinished import Heads

X = torch.ones(4, models.WIDTH)


def _time_out_soon(group: dist.ProcessGroup) -> None:
    """Set a short timeout; called late, because nothing is compiled any more."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)


def _raise(_: Any) -> None:
    raise ZeroDivisionError("a user's error")


def lacks_a_gradient(group: dist.ProcessGroup) -> None:
    """After two steps, rank 1 skips a branch that rank 0 uses."""
    ddp = DistributedDataParallel(models.Branching(), process_group=group)
    for step in range(4):
        if step == 2:
            _time_out_soon(group)
        ddp.zero_grad()
        ddp(X, "ab" if step > 1 and dist.get_rank() else "abc").sum().backward()


def fails(group: dist.ProcessGroup) -> None:
    """The third backward of rank 1 raises a user's error."""
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
    """Rank 0 has no inputs, and the first backward of rank 1 raises a user's error."""
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
        # Eager DDP's error, in the next forward of the rank that lacks a gradient; and its cause,
        # on the rank that waits for it.
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
    """The error of this rank if rank 1 has other options of the flag and of DDP."""
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


def _other_release() -> str:
    """The error of this rank if rank 1 has a release with another layout of buckets."""
    with contextlib.ExitStack() as other:
        other.enter_context(inductor_config.patch(ddp_fusion="concat"))
        if dist.get_rank() == 1:
            other.enter_context(mock.patch.object(attachment, "__version__", "9.8"))
            other.enter_context(mock.patch.object(assignment, "plan_layout", one_bucket_each))
        with pytest.raises(SettingsDifferError) as caught:
            DistributedDataParallel(models.mlp(2))
    return str(caught.value)


def one_bucket_each(pieces: Iterable[Piece], kinds: Kinds, _: BucketCaps) -> Layout:
    """A different layout than that of this release."""
    return lay_out([[(n,)] for piece in pieces for n in reversed(piece)], kinds)


def test_another_release_on_a_rank_is_an_error_on_every_rank(run_on_ranks: RUN) -> None:
    for text in run_on_ranks(2, _other_release):
        assert "the release of fusion_passes must be the same on all ranks, but is:" in text
        assert '"9.8" on rank 1' in text
        assert "the first buckets must be the same on all ranks, but is:" in text
        assert '  "1 (digest ' in text
        assert '  "4 (digest ' in text


def _rebuilt() -> tuple[list[Piece], list[float]]:
    """The buckets and gradients of this rank if rank 1 would choose another layout."""
    with contextlib.ExitStack() as other:
        other.enter_context(inductor_config.patch(ddp_fusion="concat"))
        ddp = DistributedDataParallel(models.mlp(2))
        if dist.get_rank() == 1:
            other.enter_context(mock.patch.object(assignment, "plan_layout", one_bucket_each))
        for _ in range(2):
            ddp.zero_grad()
            ddp(X * (1 + dist.get_rank())).sum().backward()
        gradients = [float(p.grad.sum()) for p in ddp.parameters() if p.grad is not None]
    return [bucket.numbers for bucket in reducer_of(ddp).assignment.layout.buckets], gradients


def test_all_ranks_take_the_buckets_that_rank_0_has_laid_out(run_on_ranks: RUN) -> None:
    first, second = run_on_ranks(2, _rebuilt)
    assert len(first[0]) == 1
    assert first == second


def test_ranks_that_differ_in_what_settings_there_are_say_so() -> None:
    text = rank_errors._in_words("DDP 0", [{"a": 1}, {"a": 1, "b": 2}])
    assert "b must be the same on all ranks, but is:\n  null on rank 0\n  2 on rank 1" in text


# --- Notes ---------------------------------------------------------------------------------------


def _note_after(ends_well: bool) -> tuple[str, bool]:
    """The text that rank 0 gets for its failed collective if rank 1 left a note in that round and,
    with ``ends_well``, finished it in a second attempt; and whether a backward without an error
    read the store."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(models.mlp(2))
        failures = reducer_of(ddp).failures
        if dist.get_rank() == 1:
            output = ddp(X)
            output.register_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
        if ends_well:
            ddp(X).sum().backward()
        dist.barrier()
        said = failures.why_failed(0, RuntimeError("timed out"))
        dist.barrier()
        asked = False
        if ends_well:
            with mock.patch.object(rank_errors, "_ask_store", side_effect=AssertionError) as ask:
                ddp(X).sum().backward()
            asked = ask.called
    return str(said or ""), asked


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_note_goes_when_its_iteration_ends_well(run_on_ranks: RUN, ends_well: bool) -> None:
    told = run_on_ranks(2, _note_after, ends_well=ends_well)
    assert told[0][1] is told[1][1] is False
    assert ("ZeroDivisionError: a user's error" in told[0][0]) is not ends_well


def _note_of_a_refused_backward() -> str:
    """The text that rank 0 gets if rank 1 calls a second backward, which is refused."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
        first, second = ddp(torch.ones(2, 2))
        first.sum().backward()
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="A second backward"):
                second.sum().backward()
        dist.barrier()
        said = reducer_of(ddp).failures.why_failed(1, RuntimeError("timed out"))
        dist.barrier()
    return str(said or "")


def test_a_backward_that_is_refused_leaves_a_note(run_on_ranks: RUN) -> None:
    told, _ = run_on_ranks(2, _note_of_a_refused_backward)
    assert "A second backward reaches outputs" in told


# --- A rank that does not come -------------------------------------------------------------------


def _constructs(flags: list[str | None], refused: int, ranks: list[int]) -> tuple[str, str, float]:
    """Construct a module on some ranks under a flag, then another one on all ranks under the flag,
    and train that for a step. Return the error of the first, the label of the second, and the
    seconds that the first took."""
    rank = dist.get_rank()
    group = dist.new_group(ranks)
    if rank not in ranks:
        return "", "", 0.0
    options: dict[str, Any] = {"mixed_precision": _MixedPrecision()} if rank == refused else {}
    error = ""
    begin = time.monotonic()
    with mock.patch.object(rank_errors, "MEET_SECONDS", 2.0):
        try:
            with inductor_config.patch(ddp_fusion=flags[rank]):
                DistributedDataParallel(models.mlp(2), process_group=group, **options)
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
        seconds = time.monotonic() - begin
        with inductor_config.patch(ddp_fusion="concat"):
            ddp = DistributedDataParallel(models.mlp(2), process_group=group)
            ddp(X).sum().backward()
    assert ddp.module[0].weight.grad is not None
    return error, reducer_of(ddp).module.label, seconds


def test_a_rank_without_the_flag_is_named_by_the_others(run_on_ranks: RUN) -> None:
    flags = ["concat", None, "concat"]
    told = run_on_ranks(3, _constructs, flags=flags, refused=-1, ranks=[0, 1, 2])
    for rank in (0, 2):
        error, label, seconds = told[rank]
        assert error.startswith(
            "DDP 0 (Sequential) is constructed under torch._inductor.config.ddp"
        )
        assert f"on rank {rank}, and after 2 s not on rank 1 of the same process group" in error
        assert "Set ddp_fusion on all ranks" in error
        assert label == "DDP 0 (Sequential)"
        assert 2 <= seconds < 20
    assert told[1][:2] == ("", "DDP 0 (Sequential)")


def test_ranks_of_a_subgroup_are_waited_for_alone(run_on_ranks: RUN) -> None:
    told = run_on_ranks(3, _constructs, flags=[None, None, "concat"], refused=-1, ranks=[1, 2])
    assert "on rank 1, and after 2 s not on rank 0 of the same process group" in told[2][0]
    assert told[1][:2] == ("", "DDP 0 (Sequential)")


def test_a_refusal_on_one_rank_is_an_error_on_the_others(run_on_ranks: RUN) -> None:
    told = run_on_ranks(2, _constructs, flags=["concat"] * 2, refused=1, ranks=[0, 1])
    assert "mixed_precision=...) is not supported" in told[1][0]
    assert "after 2 s not on rank 1 of" in told[0][0]
    assert {label for _, label, _ in told} == {"DDP 0 (Sequential)"}


class Store:
    """A store that never answers."""

    def __init__(self) -> None:
        self.is_ended = threading.Event()

    def append(self, *_: object) -> None:
        self.is_ended.wait()
        raise RuntimeError("it has no answer")


def _group(store: object, size: int = 20, rank: int = 3) -> Any:
    return mock.Mock(size=lambda: size, rank=lambda: rank, get_group_store=lambda: store)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_errors, "MEET_SECONDS", 0.2)
    monkeypatch.setattr(rank_errors, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(rank_errors, "group_timeout", lambda _: timedelta(seconds=0.4))


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("is_in_step", "seconds"), [(True, "0.2"), (False, "0.4")])
def test_many_missing_ranks_are_counted(is_in_step: bool, seconds: str) -> None:
    group = _group(dist.HashStore())
    words = f"on rank 3, and after {seconds} s not on rank 0, 1, 2, 4, 5, 6, 7, 8 and 11 more of"
    with pytest.raises(RanksDisagreeError, match=words):
        meet_ranks(group, "DDP 0 (Net)", 0, is_in_step=is_in_step)


@pytest.mark.usefixtures("short_waits")
def test_ranks_meet_for_each_module_anew() -> None:
    store = dist.HashStore()
    meetings = [
        functools.partial(meet_ranks, _group(store, 3, rank), "", 0, is_in_step=True)
        for rank in range(3)
    ]
    for _ in range(2):
        with pytest.raises(RanksDisagreeError, match="not on rank 1, 2 of"):
            meetings[0]()
    run_at_once(meetings)
    with pytest.raises(RanksDisagreeError, match="not on rank 0, 2 of"):
        meet_ranks(_group(store, 3, 1), "", 1, is_in_step=True)


@pytest.mark.usefixtures("short_waits")
def test_where_the_store_does_not_answer_collectives_tell() -> None:
    store = Store()
    meet_ranks(_group(store), "DDP 0 (Net)", 0, is_in_step=True)
    store.is_ended.set()
    meet_ranks(_group(store), "DDP 0 (Net)", 0, is_in_step=True)


def test_a_rank_alone_asks_nobody() -> None:
    meet_ranks(_group(None, size=1), "DDP 0 (Net)", 0, is_in_step=True)
