"""Modules that share a process group in one backward: their collectives pair up in one order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from fusion_passes.agreement import participant
from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.sharing import end_sharing, sharing_on
from fusion_passes.agreement.usage import Usage

GROUP = "queue"


def _list(*buckets: tuple[int, tuple[int, ...]], mode: str = "concat") -> LaunchList:
    """Of places and parameters."""
    return LaunchList(mode, tuple(Collective("by", "float32", n, place) for place, n in buckets))


FIRST = _list((0, (3,)), (2, (1,)))
SECOND = _list((1, (3, 2)), (3, (1, 0)))
OTHER_SECOND = _list((1, (2, 3)), (3, (1, 0)))
OTHER_FIRST = _list((0, (1,)), (2, (3,)))


@pytest.fixture(autouse=True)
def _others_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There are other ranks, and whoever meets them fails."""
    monkeypatch.setattr(participant, "meeting_of", lambda _: object())
    yield
    end_sharing(GROUP)


def _module(name: str, *agreed: LaunchList, process_group: str = GROUP) -> Participant:
    module = Participant(name, name, process_group=process_group)
    module.history[""] = list(agreed)
    return module


def test_what_follows_in_the_graph_stays_on_the_rank_too() -> None:
    first, second = _module("first", FIRST), _module("second", SECOND)
    assert first.agrees_to(FIRST)
    assert not second.agrees_to(OTHER_SECOND)
    assert first.is_local
    assert first.unsent == [FIRST.collectives[1]], "the first one has been launched"
    assert (first.position, first.late) == (1, {1: False})
    assert (second.position, second.unsent) == (0, [])
    assert first.turn == second.turn == 1, "they are run by their places"
    assert first.next_late(lambda: FIRST).collectives == FIRST.collectives[1:]
    assert first.turn is None


def test_what_was_launched_in_front_stays_launched() -> None:
    before, after = _module("before", _list((0, (0,)))), _module("after", SECOND)
    assert before.agrees_to(_list((0, (0,))))
    assert not after.agrees_to(OTHER_SECOND)
    assert (before.is_local, before.position, before.unsent) == (False, 1, [])


def test_a_module_that_agrees_follows_one_of_its_graph_that_does_not() -> None:
    first, second = _module("first", FIRST), _module("second", SECOND)
    first.announce(OTHER_FIRST)
    second.announce(SECOND)
    assert (first.is_local, second.is_local) == (True, True)
    assert (second.position, second.unsent) == (0, [])
    assert second.late == dict.fromkeys(range(4), False)


def test_graphs_that_follow_wait_for_nobody() -> None:
    first, second = _module("first", FIRST), _module("second")
    assert not first.agrees_to(OTHER_FIRST)
    assert not second.agrees_to(_list((0, (0,)))), "it would have met the others"
    second.history[""] = [_list((0, (0,))), _list((0, (0,)), mode=LATE)]
    assert (first.turn, second.turn) == (1, 2)
    second.position = 1
    assert second.turn == math.inf, "no graph of this rank has come to it: it follows them"


def test_a_place_that_comes_again_is_of_another_graph() -> None:
    """In which what was launched in front is of a module that is not averaged."""
    first, second = _module("first", FIRST), _module("second", _list((2, (0,))))
    assert not first.agrees_to(OTHER_FIRST)
    assert not second.agrees_to(_list((2, (0,))))
    assert (first.turn, second.turn) == (1, 2)


def test_another_process_group_goes_on() -> None:
    first, apart = _module("first", FIRST), _module("apart", SECOND, process_group="another")
    assert not first.agrees_to(OTHER_FIRST)
    assert apart.agrees_to(SECOND)
    end_sharing("another")


def test_the_next_backward_begins_anew() -> None:
    first, second = _module("first", FIRST), _module("second", SECOND)
    assert not first.agrees_to(OTHER_FIRST)
    end_sharing(GROUP)
    assert second.agrees_to(SECOND)
    assert sharing_on(GROUP).turn("first", 0) == math.inf


def test_averages_of_what_was_launched_are_delivered() -> None:
    usage = Usage(trained=(1, 3), flags=9, has_gradient=lambda _: False)
    usage.reached = frozenset({1, 3})
    first = _module("first", FIRST)
    first.is_local, first.position, first.usage = True, 1, usage
    first.unsent = [FIRST.collectives[1]]
    first.deliver([3, 1], [torch.ones(1), torch.zeros(1)], torch.ones(3))
    assert usage.averages.pop(9).tolist() == [False] * 3, "the flags are not on their way"
    assert usage.averages == {3: torch.ones(1)}
    first.unsent = []
    first.deliver([1], [torch.zeros(1)], torch.ones(3))
    assert set(usage.averages) == {3}
