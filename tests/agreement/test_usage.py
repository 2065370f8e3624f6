"""What ranks know of the parameters that they use, where these may be others in each step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from unittest import mock

import torch

from fusion_passes.agreement.comparing import compare_statements, statement_of, whole_list
from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.usage import Usage

FLAGS = 9


def launches(*numbers: int, mode: str = "concat") -> LaunchList:
    return LaunchList(mode, (Collective("by", "float32", numbers, 0),))


def usage(reached: set[int], kept: tuple[int, ...] = ()) -> Usage:
    """Of a rank whose backward reaches these parameters, with gradients kept of others."""
    return Usage((0, 2, 3), FLAGS, kept.__contains__, frozenset(reached))


def test_zeros_are_wrong_for_a_gradient_that_was_kept() -> None:
    assert not usage({0}, kept=(0, 3)).refuses(launches(0, 2, FLAGS))
    assert usage({0}, kept=(2,)).refuses(launches(0, 2, FLAGS))


def test_a_graphs_flags_do_not_have_what_was_used_before() -> None:
    late = usage({0})
    late.pending = {0}
    assert not late.refuses(launches(0, 2, FLAGS))
    late.pending = {0, 3}
    assert late.refuses(launches(0, 2, FLAGS))


def test_a_graph_may_be_a_part_where_the_others_are_known_to_send_the_rest() -> None:
    part, rest = launches(0, FLAGS), launches(2, FLAGS)
    assert not usage({0, 2}).refuses(part), "the ranks are about to meet"
    assert not usage({0, 2}).refuses(part, [part, rest])
    assert usage({0, 2, 3}).refuses(part, [part, rest]), "no flags would say that 3 is used"


def test_a_communication_hook_is_given_all_at_once() -> None:
    hooked = usage({0, 2})
    hooked.sends_all = True
    assert hooked.refuses(launches(0, FLAGS), [launches(0, FLAGS), launches(2, FLAGS)])
    assert not hooked.refuses(launches(0, 2, 3, FLAGS), [])


def test_flags_are_written_and_read() -> None:
    known = usage({0})
    assert known.flags_of({3, 0}) == [1.0, 0.0, 1.0, 0.0]
    known.note_flags(torch.tensor([0.5, 0.0, 0.0, 0.0]))
    known.read(known.averages[FLAGS], may_reorder=True)
    assert known.used == frozenset({0})
    known.note_flags(torch.tensor([0.0, 0.0, 0.25, 0.0]))
    known.read(known.averages[FLAGS], may_reorder=True)
    assert known.used == frozenset({0, 3}), "of any graph"
    assert not known.is_new


def test_the_last_flag_lets_ranks_meet_anew() -> None:
    known, order = usage({0}), [launches(0, FLAGS), launches(2, 3, FLAGS)]
    flags = torch.tensor([1.0, 1.0, 0.0, 0.5])
    met = []
    for number in range(1, 301):
        may_reorder = known.may_reorder(order)
        known.read(flags, may_reorder)
        assert known.is_new == may_reorder
        met += [number] if may_reorder else []
        known.end_round("", order)
        if may_reorder:  # The next round is the one in which they meet.
            known.end_round("", order)
    assert met == [2, 4, 8, 16, 32, 64, 128, 192, 256], "ever less often"


def test_ranks_that_send_all_at_once_have_no_order() -> None:
    known = usage({0})
    known.settled = 1
    assert not known.may_reorder([launches(0, 2, 3, FLAGS)])
    assert known.may_reorder([launches(0, 2, 3, FLAGS, mode=LATE)])
    known.sends_all = True
    assert not known.may_reorder([launches(0, FLAGS), launches(2, 3, FLAGS)])


def test_a_part_that_no_rank_reaches_is_sent_by_itself() -> None:
    known, parts = usage({0}), [launches(0, FLAGS), launches(2, FLAGS), launches(3, FLAGS)]
    for count in range(1, 4):
        known.note_agreed("", parts[:count])
    left = launches(0, 2, 3, FLAGS, mode=LATE)
    assert known.known_part("", left) == parts[2]
    assert known.known_part("", launches(0, 2, FLAGS, mode=LATE)) == parts[1]
    assert known.known_part("extra", left) is None, "nobody has said that it is sent there"
    known.sends_all = True
    assert known.known_part("", left) is None, "a communication hook takes all at once"
    known.sends_all = False
    known.note_agreed("", [launches(2, 3, FLAGS)])
    assert known.parts == [parts[0], launches(2, 3, FLAGS)], "in the place of those within it"
    known.note_agreed("", [left])
    assert len(known.parts) == 2, "what is sent by hand is no part"


def test_parts_come_as_they_were_met_or_as_they_were_registered() -> None:
    known, late = usage({0}), launches(1, 3, FLAGS, mode=LATE)
    first, second, third = (launches(number, FLAGS) for number in (3, 2, 0))
    met = [second, late, third, first]
    assert known.end_round("", met) == met
    known.reorders = 1
    assert known.end_round("", met) == [first, second, late, third]
    known.reorders = 2
    assert known.end_round("", met) == met


@contextlib.contextmanager
def others_that_never_come() -> Iterator[None]:
    """There are other ranks, and who waits for them fails."""
    place = "fusion_passes.agreement.participant"
    with mock.patch(f"{place}.meet", side_effect=AssertionError), mock.patch(f"{place}.meeting_of"):
        yield


def test_what_comes_in_another_order_waits_for_nobody() -> None:
    first, second = launches(2, FLAGS), launches(3, FLAGS)
    mine = Participant("ddp", "0", usage({2, 3}))
    mine.history[""] = [first, second]
    with others_that_never_come():
        assert not mine.agrees_to(second)
    assert mine.usage is not None
    assert mine.usage.is_out_of_order
    assert mine.usage.flags_of({2, 3})[-1] == 1
    mine.usage.end_round("", mine.history[""])
    assert not mine.usage.is_out_of_order


def test_a_part_that_comes_after_all_that_is_sent_waits_for_nobody() -> None:
    mine = Participant("ddp", "0", usage({2, 3}))
    mine.history[""], mine.position = [launches(2, FLAGS)], 1
    with others_that_never_come():
        assert not mine.agrees_to(launches(3, FLAGS))


def test_parts_that_stay_now_and_then_are_not_often() -> None:
    known = usage({0})
    for _ in range(3):
        assert not known.is_often_in_parts(rounds=3)
        known.begin_backward(frozenset({0, 2}))
        known.keep_part()
        known.keep_part()
    assert known.is_often_in_parts(rounds=11)
    assert not known.is_often_in_parts(rounds=12)
    known.begin_backward(frozenset({0}))
    assert not known.is_often_in_parts(rounds=3), "not in this backward"


def test_flags_of_postponed_launches_are_read_later() -> None:
    known = usage({0})
    known.is_postponed = True
    known.deliver([], [], torch.tensor([True, False, False]))
    assert FLAGS not in known.averages


def test_ranks_that_have_met_send_until_none_has_more() -> None:
    mine = Participant("ddp", "0", usage=usage({0, 2}))
    assert mine.has_more_to_send, "nothing was sent"
    mine.history[""], mine.position, mine.meetings = [launches(0, FLAGS)], 1, 1
    assert mine.has_more_to_send, "others may have another graph"
    assert mine.sent_now == {0, FLAGS}
    mine.meetings = 0
    assert not mine.has_more_to_send, "the ranks know what they send"
    mine.history[""].append(launches(2, FLAGS))
    assert mine.has_more_to_send, "others have another graph"
    mine.position = 2
    assert not mine.has_more_to_send


def test_flags_are_read_but_where_all_is_used_and_sent() -> None:
    known = usage({0})
    assert known.must_read("", frozenset({0, 2, 3}))
    known.learn("", [launches(0, 2).encode(), launches(3).encode()])
    assert known.sent[""] == {0, 2, 3, FLAGS}
    assert not known.must_read("", frozenset({0, 2, 3}))
    assert known.must_read("", frozenset({0, 2}))


def test_ranks_meet_again_once_they_send_something_else() -> None:
    known = usage({0})
    known.learn("", [launches(0, 2).encode()])
    known.pending = {2}
    agreed = [launches(0, 2, FLAGS)]
    assert known.end_round("", agreed) == []
    assert known.end_round("", agreed) == agreed
    assert known.sent
    assert not known.pending


def test_what_no_rank_uses_is_not_sent_for_ever() -> None:
    known, part, other = usage({0}), launches(0, FLAGS), launches(2, 3, FLAGS)
    known.sent[""] = frozenset({0, 2, 3, FLAGS})
    for used, rounds in (({0}, 7), ({0, 3}, 1), ({0}, 7), (None, 1), ({0}, 7)):
        for _ in range(rounds):
            known.used = None if used is None else frozenset(used)
            assert known.end_round("", [part, other]) == [part, other]
    known.used = frozenset({0})
    assert known.end_round("", [part, other]) == [part]
    assert known.sent[""] == {0, FLAGS}


def test_a_rank_sends_zeros_for_parts_that_it_leaves_out() -> None:
    first, second, third = (launches(number, FLAGS) for number in (0, 2, 3))
    mine, sent = Participant("ddp", "0", usage({0, 3})), list[LaunchList]()
    mine.history[""] = [first, second, third]
    mine.launch_absent = lambda _, item: lambda: sent.append(item)
    assert mine.agrees_to(first)
    assert mine.agrees_to(third)
    assert (mine.position, mine.is_local) == (3, False)
    assert [finish() for finish in mine.absent] == [None]
    assert sent == [second]


def test_a_part_that_is_used_or_comes_later_is_left_out_by_nobody() -> None:
    first, second, third = (launches(number, FLAGS) for number in (0, 2, 3))
    mine = Participant("ddp", "0", usage({0, 2, 3}))
    mine.history[""] = [first, second, third]
    assert mine.absent_before(third) == [], "its backward reaches them"
    assert mine.absent_before(launches(0, 2, FLAGS)) == [], "nobody expects it"
    mine.usage = usage({3})
    assert mine.absent_before(third) == [first, second]
    mine.usage.sends_all = True
    assert mine.absent_before(third) == [], "a communication hook takes all at once"


def test_ranks_that_meet_in_other_parts_run_them_one_after_the_other() -> None:
    a, b, late = launches(0, FLAGS), launches(2, FLAGS), launches(3, FLAGS, mode=LATE)

    def verdict(*said: tuple[LaunchList, set[int]]) -> object:
        texts = {rank: statement_of("", item, reached) for rank, (item, reached) in enumerate(said)}
        kind, value = json.loads(compare_statements(texts, may_lack=True))
        return LaunchList.decode(value) if kind == "run" else kind

    assert verdict((a, {0, 2}), (b, {2, 3})) == a
    assert verdict((b, {2, 3}), (a, {0, 2})) == a, "the first rank has no part for the second"
    assert verdict((a, {0, 3}), (b, {2, 3})) == b, "a backward of both has the last one first"
    assert verdict((b, {2, 3}), (a, {0, 3})) == b
    assert verdict((a, {0, 2}), (b, {0, 2})) == "nothing", "in another order"
    assert verdict((late, {3}), (a, {0, 2})) == a
    assert verdict((a, {0, 2}), (a, {0, 3})) == a
    assert verdict((a, {0}), (b, {2})) == "nothing", "whole backwards get zeros in their graphs"


def test_the_list_of_all_ranks_has_what_any_has() -> None:
    a, ab, b = launches(0, FLAGS), launches(0, 2, FLAGS), launches(2, FLAGS)
    assert whole_list([a, ab, b]) == ab
    assert whole_list([a, b]) is None
    late = launches(0, 2, FLAGS, mode=LATE)
    assert whole_list([late, ab]) == ab
    assert whole_list([a, late]) == late
