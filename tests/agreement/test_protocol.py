"""All ranks run the same collectives, or all of them get an error that names what differs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
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

from fusion_passes import FusionConfig, RanksDisagreeError
from fusion_passes.agreement import exchange
from fusion_passes.agreement.comparing import compare_statements
from fusion_passes.agreement.launches import (
    FOLLOWS,
    LATE,
    Collective,
    LaunchList,
    number_runs,
    numbers_in,
)
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants, why_failed
from fusion_passes.torch_private import register_process_group, unregister_process_group
from testing.failing import failing

RUN = Callable[..., list[Any]]
SECONDS = 5.0
"""The groups' timeout: how long a rank waits for one that does not come."""

COMPILING_SECONDS = 10.0
"""The same where one rank may still compile while the other waits."""


# --- Of lists -----------------------------------------------------------------------------------

_COLLECTIVES = st.builds(
    Collective,
    st.sampled_from(["before", "by", "after"]),
    st.sampled_from(["float32", "bfloat16", "complex64"]),
    st.lists(st.integers(0, 30)).map(tuple),
    st.integers(0, 5),
)


@given(st.lists(st.integers(0, 30)))
def test_runs_of_numbers_are_read_as_they_were_written(numbers: list[int]) -> None:
    assert numbers_in(number_runs(numbers)) == numbers


def test_runs_of_numbers_are_short() -> None:
    assert number_runs([*range(9999, -1, -1), 7, 8, 9]) == "9999-0,7-9"
    assert number_runs([4, 5, 4]) == "4-5,4"


@given(
    st.sampled_from(["concat", LATE]),
    st.lists(_COLLECTIVES).map(tuple),
    st.lists(_COLLECTIVES.map(lambda item: replace(item, place=0))).map(tuple),
)
def test_lists_are_read_as_they_were_written(
    mode: str, collectives: tuple[Collective, ...], later: tuple[Collective, ...]
) -> None:
    launches = LaunchList(mode, collectives, later)
    read = LaunchList.decode(launches.encode())
    assert (read, read.later) == (launches, later)


def test_what_is_left_for_later_needs_no_agreement_in_the_graph() -> None:
    items = [Collective("before", "float32", (3,), 0), Collective("by", "float32", (1,), 0)]
    me = Participant("alone", "key")
    me.announce(LaunchList("concat", (), tuple(items)))
    assert (me.late, me.received, me.position) == ({3: True, 1: False}, {1, 3}, 0)


def test_a_static_graph_is_known_to_ranks_that_had_no_inputs_in_its_first_iteration() -> None:
    refused: list[frozenset[int]] = []
    me = Participant("alone", "key", refuse=lambda new, _: refused.append(frozenset(new)))
    me.used = frozenset({0, 1})
    me.receive([0])
    assert refused == []
    me.receive([1, 2])
    assert refused == [frozenset({2})]


def test_who_follows_runs_what_others_do() -> None:
    said = {0: _list((3,), (2, 1, 0), mode=FOLLOWS), 1: _list((2,), (0,)), 2: _list((2,), (0,))}
    text = {rank: json.dumps(["", item.encode()]) for rank, item in said.items()}
    assert json.loads(compare_statements(text, may_lack=False)) == ["run", said[1].encode()]
    assert json.loads(compare_statements({0: text[0]}, may_lack=False)) == ["run", said[0].encode()]
    assert "no inputs" in said[0].describe("abcd")


def test_the_text_of_a_list() -> None:
    items = (Collective("by", "float32", (5, 4, 3), 0), Collective("after", "bfloat16", (2,), 3))
    assert (
        LaunchList("concat", items).encode() == "concat; avg float32 5-3; @3 sum/after bfloat16 2"
    )


# --- Of participants ----------------------------------------------------------------------------


def _list(*buckets: tuple[int, ...], mode: str = "concat") -> LaunchList:
    items = enumerate(buckets)
    return LaunchList(mode, tuple(Collective("by", "float32", b, index) for index, b in items))


def _participant(name: str, settings: str = "") -> Participant:
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    register_process_group(name, group)
    return Participant(name, name, settings=lambda: settings)


def _error(function: Callable[[], object]) -> RanksDisagreeError | None:
    try:
        function()
    except RanksDisagreeError as error:
        return error
    return None


def graphs_in_turn() -> tuple[int, int, bool]:
    """Two graphs a round, five rounds; returns the store's keys before and after the last four."""
    me = _participant("turns")
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(5):
        for launches in (_list((3, 2)), _list((1,), (0,))):
            me.announce(launches)
        me.end_round()
        dist.barrier()
        counts.append(store.num_keys())
    dist.barrier()  # A rank that ends notes that in the store.
    unregister_process_group("turns")
    return counts[0], counts[-1], me.is_local


def test_ranks_ask_each_other_only_in_the_first_round(run_on_ranks: RUN) -> None:
    for first, last, is_local in run_on_ranks(2, graphs_in_turn):
        assert last <= first, "no key is left behind, and none is written"
        assert not is_local


def other_order() -> tuple[bool, list[str], bool]:
    """The ranks reduce the same gradients, in other buckets."""
    me = _participant("order")
    own = _list((1, 0)) if dist.get_rank() else _list((1,), (0,))
    me.announce(own)
    unregister_process_group("order")
    return me.is_local, [item.encode() for item in me.agreed], me.needs_replanning


def test_the_lowest_rank_decides_where_only_buckets_differ(run_on_ranks: RUN) -> None:
    agreed = ["concat; avg float32 1; avg float32 0"]
    assert run_on_ranks(2, other_order) == [(False, agreed, False), (True, agreed, True)]


def one_has_changed() -> tuple[bool, float, list[list[int]]]:
    """Rank 1 comes to launch other graphs, alone. It does what was agreed on, by hand."""
    me = _participant("changed")
    me.announce(_list((2, 1), (0,)))
    me.end_round()
    start = time.monotonic()
    rank = dist.get_rank()
    for launches in (_list((0, 1)), _list((2,))) if rank else (_list((2, 1), (0,)),):
        me.announce(launches)
    seconds = time.monotonic() - start
    done = []
    while me.late:
        item = me.next_late(lambda: _list(tuple(me.late), mode=LATE))
        done += [list(bucket.parameters) for bucket in item.collectives]
        for number in item.parameters:
            del me.late[number]
    unregister_process_group("changed")
    return me.is_local, seconds, done


def test_a_rank_that_changes_alone_does_what_was_agreed_on(run_on_ranks: RUN) -> None:
    same, changed = run_on_ranks(2, one_has_changed)
    assert (same[0], same[2]) == (False, [])
    assert (changed[0], changed[2]) == (True, [[2, 1], [0]])
    assert changed[1] < SECONDS / 2, "it does not wait for the group's timeout"


def all_have_changed() -> tuple[bool, list[str]]:
    me = _participant("all")
    me.announce(_list((2, 1, 0)))
    me.end_round()
    for launches in (_list((0, 1)), _list((2,))):
        me.announce(launches)
    unregister_process_group("all")
    return me.is_local, [item.encode() for item in me.agreed]


def test_ranks_that_change_together_agree_anew(run_on_ranks: RUN) -> None:
    agreed = ["concat; avg float32 0-1", "concat; avg float32 2"]
    assert run_on_ranks(2, all_have_changed) == [(False, agreed)] * 2


def other_settings() -> dict[int, str]:
    me = _participant("settings", f"of {dist.get_rank()}")
    error = _error(lambda: me.announce(_list((0,))))
    unregister_process_group("settings")
    assert error is not None
    return dict(error.settings)


def _is_connected() -> bool:
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group())
    return ddp.process_group in exchange._meetings


def test_the_store_is_connected_to_before_its_host_can_fail(run_on_ranks: RUN) -> None:
    """While an error is handled, connecting to a host that has stopped has no time limit."""
    assert run_on_ranks(2, _is_connected) == [True, True]


def test_ranks_with_other_settings_stop(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, other_settings) == [{0: "of 0", 1: "of 1"}] * 2


def one_fails() -> tuple[str, bool]:
    """Rank 1 fails between two graphs; both try again."""
    me = _participant("fails")
    me.announce(_list((1,)))
    error = None
    if dist.get_rank():
        me.leave_word("bad luck")
    else:
        error = _error(lambda: me.announce(_list((0,))))
    me.fail_round()
    for launches in (_list((1,)), _list((0,))):
        me.announce(launches)
    unregister_process_group("fails")
    return error.failure if error else "", me.is_local


def test_a_rank_that_fails_is_heard_at_once_and_all_go_on(run_on_ranks: RUN) -> None:
    start = time.monotonic()
    assert run_on_ranks(2, one_fails) == [("rank 1: bad luck", False), ("", False)]
    assert time.monotonic() - start < 60


def one_fails_first() -> bool:
    """Rank 0 fails, and has waited in vain for rank 1 before that fails too."""
    me = _participant("first")
    me.announce(_list((0,)))
    if not dist.get_rank():
        me.fail_round()
        waited = _error(lambda: me.announce(_list((0,))))
        assert waited is not None
        assert waited.silent == [1]
    dist.barrier()
    me.fail_round()
    me.announce(_list((0,)))
    unregister_process_group("first")
    return me.is_local


def test_ranks_that_have_failed_in_turn_meet_again(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, one_fails_first) == [False, False]


def nobody_is_waiting() -> bool:
    me = participants["quiet"] = _participant("quiet")
    me.announce(_list((0,)))
    found = why_failed(["quiet"])
    del participants["quiet"]
    unregister_process_group("quiet")
    return found is None


def test_other_failures_stay_what_they_are(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, nobody_is_waiting) == [True, True]


def others_have_said_who_has_ended() -> str:
    """Where ranks wait for one whose process has ended, while this one is in a collective."""
    me = participants["ended"] = _participant("ended")
    me.announce(_list((0,)))
    meeting = exchange.meeting_of("ended")
    assert meeting is not None
    word = json.dumps([exchange.ENDED, "rank 7: its process (1) has ended"])
    meeting.store.compare_set(f"{me.place}/verdict", "", word)
    found = why_failed(["ended"])
    del participants["ended"]
    unregister_process_group("ended")
    return found.failure if found else ""


def test_a_collective_that_fails_since_a_process_has_ended_says_so(run_on_ranks: RUN) -> None:
    (said,) = set(run_on_ranks(2, others_have_said_who_has_ended))
    assert said == "rank 7: its process (1) has ended"


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


def leaves_out_a_layer(mode: str, from_step: int, is_traced: bool) -> str:
    """Rank 1 leaves the second layer out, from a step on. Returns the error's text."""
    group = dist.new_group(timeout=timedelta(seconds=COMPILING_SECONDS if is_traced else SECONDS))
    with inductor_config.patch(ddp_fusion=mode):
        ddp = DistributedDataParallel(Branch(), process_group=group)
        compiled = torch.compile(ddp) if is_traced else ddp
        options = {} if is_traced else {"create_graph": True}
        for step in range(from_step + 1):
            uses_second = step < from_step or dist.get_rank() == 0
            loss = compiled(torch.ones(2, 4), uses_second).sum()
            if step < from_step:
                loss.backward(**options)
        dist.barrier()  # One rank has compiled another forward.
        with pytest.raises(RanksDisagreeError) as caught:
            loss.backward(**options)
    return str(caught.value)


@pytest.mark.parametrize("from_step", [0, 2])
@pytest.mark.parametrize(
    ("mode", "is_traced"),
    [
        ("concat", True),
        pytest.param("coalesced", True, marks=pytest.mark.nightly),
        ("concat", False),
    ],
)
@pytest.mark.filterwarnings("ignore::fusion_passes.FusionWarning")
def test_a_parameter_without_a_gradient_on_one_rank_is_an_error_on_all(
    run_on_ranks: RUN, mode: str, from_step: int, is_traced: bool
) -> None:
    first, second = run_on_ranks(
        2, leaves_out_a_layer, mode=mode, from_step=from_step, is_traced=is_traced
    )
    layer = "'second.weight', 'second.bias'"
    assert first.startswith("The ranks of DDP 0 (Branch) do not reduce the same gradients")
    assert f"{layer}: a gradient on rank 0, and none on rank 1." in first
    assert "find_unused_parameters=True" in first
    if from_step == 0:  # All ranks have said what they have.
        assert second == first
    else:
        assert second.startswith("Rank 1 of DDP 0 (Branch) cannot reduce what all ranks have")
        assert f"{layer}: no gradient on rank 1." in second
        assert "find_unused_parameters=True" in second


def has_another_flag() -> str:
    flag = FusionConfig(mode="coalesced", bucket_cap_mb=2) if dist.get_rank() else "concat"
    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(RanksDisagreeError) as caught:
            ddp(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


def test_another_flag_on_one_rank_is_an_error_that_says_so(run_on_ranks: RUN) -> None:
    for text in run_on_ranks(2, has_another_flag):
        assert "torch._inductor.config.ddp_fusion must be the same on all ranks, but is:" in text
        assert '"mode": "coalesced", "bucket_cap_mb": 2' in text
        assert "Set it to one value on all ranks" in text
        assert "find_unused_parameters" not in text


def fails_on_one_rank() -> tuple[str, float]:
    """The first backward fails on rank 1 before anything is launched. Returns the error's text and
    after how many seconds it came; a second try must work."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        loss = ddp(torch.ones(2, 4)).sum()
        bad = dist.get_rank() == 1
        start = time.monotonic()
        with pytest.raises((RanksDisagreeError, Exception)) as caught:
            (failing(loss, "no gradient on rank 1") if bad else loss).backward()
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
