"""Ranks that speak of their plan over a store: who waits, who does not, and what becomes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fusion_passes.agreement.exchange import Meeting
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.ddp import replan_meetings
from fusion_passes.ddp.replan_meetings import decline, meet, say_failed
from fusion_passes.ddp.replan_verdicts import (
    EARLY,
    LEFT,
    OTHER_GRAPHS,
    OTHER_PLANS,
    compiled,
    measured,
    timed,
)

# --- What becomes of what they say ---------------------------------------------------------------


def _value(chosen_from: str = "a", because: str = "", launches: str = "x") -> dict[str, Any]:
    times = [5, 9] if because else [4, 8]
    return {
        "launches": launches,
        "times_ns": times,
        "chosen_from": chosen_from,
        "because": because,
    }


def _said(*items: tuple[str, Any]) -> dict[int, str]:
    return {rank: json.dumps(item) for rank, item in enumerate(items)}


def _merge(launches: str, times: Any) -> str:
    return f"{launches} {times}"


@pytest.mark.parametrize(
    ("items", "verdict"),
    [
        (
            [("measured", _value()), ("measured", _value())],
            ["measured", {"steps": "x [[4], [4]]", "first_ns": 8, "because": ""}],
        ),
        (
            [("measured", _value()), ("measured", _value("", "a hook"))],
            ["measured", {"steps": "x [[4], [5]]", "first_ns": 9, "because": "a hook"}],
        ),
        (
            [("measured", _value()), ("measured", _value("b"))],
            ["measured", {"steps": "x [[4], [4]]", "first_ns": 8, "because": OTHER_PLANS}],
        ),
        ([("measured", _value()), ("measured", _value(launches="y"))], ["stop", OTHER_GRAPHS]),
        ([("measured", _value()), (EARLY, "a profiler ran")], ["again", "a profiler ran"]),
        ([(EARLY, ""), (LEFT, "it is joined")], ["stop", "it is joined"]),
    ],
)
def test_any_rank_can_keep_all_from_a_second_plan(
    items: list[tuple[str, Any]], verdict: list[Any]
) -> None:
    assert json.loads(measured(_said(*items), _merge)) == verdict


def test_the_lowest_rank_that_could_not_compile_is_named() -> None:
    said = {rank: json.dumps(text) for rank, text in enumerate(["", "no space", "no g++"])}
    assert json.loads(compiled(said)) == [
        "stop",
        "the second compile has failed on rank 1: no space",
    ]
    assert json.loads(compiled(dict.fromkeys(range(2), '""'))) == ["go", ""]


def test_the_slowest_rank_counts() -> None:
    assert json.loads(timed(_said(("measured", 7), ("measured", 9)))) == ["timed", 9]
    assert json.loads(timed(_said(("measured", 7), (EARLY, "")))) == ["again", ""]
    assert json.loads(timed(_said(("measured", 7), (LEFT, "it is joined"))))[0] == "stop"


# --- Over a store --------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Participant]:
    """Two ranks that wait for a second."""
    store = dist.HashStore()
    meetings = {f"r{r}": Meeting(r, 2, timedelta(seconds=1), store, store) for r in range(2)}
    monkeypatch.setattr(replan_meetings, "meeting_of", meetings.get)
    return [Participant(name, "key", meets_at=0) for name in meetings]


def _say(participant: Participant, text: str = '["measured", 1]') -> tuple[str, Any]:
    return meet(participant, "DDP 0 (Net)", "steps", text, timed)


def _together(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except RanksDisagreeError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_all_hear_the_same(ranks: list[Participant]) -> None:
    one, other = ranks
    said = _together(lambda: _say(one), lambda: _say(other, '["measured", 3]'))
    assert said == [("timed", 3), ("timed", 3)]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_does_not_meet_goes_on_and_the_others_too(
    ranks: list[Participant], is_first: bool
) -> None:
    one, other = ranks
    if is_first:
        decline(other, "it is joined")
        assert _say(one) == ("stop", "it is joined")
    else:
        said = _together(lambda: _say(one), lambda: decline(other, "it is joined"))
        assert said[0] == ("stop", "it is joined")
    assert other.meets_at == -1


def test_who_comes_too_late_gets_the_error_of_who_has_waited(ranks: list[Participant]) -> None:
    one, other = ranks
    with pytest.raises(RanksDisagreeError, match=r"ranks \[1\] have not come within 1 s") as found:
        _say(one)
    assert found.value.silent == [1]
    with pytest.raises(RanksDisagreeError, match=r"ranks \[1\] have not come within 1 s"):
        _say(other)


def test_who_ends_is_heard_of_at_once(ranks: list[Participant]) -> None:
    one, other = ranks
    say_failed(other, "steps", "KeyboardInterrupt")
    with pytest.raises(RanksDisagreeError, match="but rank 1 has ended with KeyboardInterrupt"):
        _say(one)
