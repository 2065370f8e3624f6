"""What runs in processes of its own, some at a time. Here without processes."""

from __future__ import annotations

import pytest

from testing.side_by_side import run_side_by_side


class _Counter:
    """Is done after some polls."""

    def __init__(self, polls: int, alive: list[int]) -> None:
        self.polls, self.left, self.alive = polls, polls, alive
        alive.append(polls)

    def poll(self) -> str | None:
        self.left -= 1
        if self.left:
            return None
        self.discard()
        return f"after {self.polls}"

    def discard(self) -> None:
        self.alive.remove(self.polls)


def test_some_run_at_a_time() -> None:
    alive: list[int] = []
    done, most = [], []

    def start(polls: int) -> _Counter:
        counter = _Counter(polls, alive)
        most.append(len(alive))
        return counter

    run_side_by_side([3, 1, 4, 2], start, lambda *item: done.append(item), jobs=2)
    assert done == [(1, "after 1"), (3, "after 3"), (4, "after 4"), (2, "after 2")]
    assert max(most) == 2
    assert alive == []


def test_what_is_not_started_is_left_out() -> None:
    done: list[tuple[int, str]] = []
    run_side_by_side(
        [1, 2, 3],
        lambda polls: None if polls == 2 else _Counter(polls, []),
        lambda *item: done.append(item),
        jobs=1,
    )
    assert done == [(1, "after 1"), (3, "after 3")]


def test_what_runs_is_ended_where_an_outcome_stops_the_run() -> None:
    alive: list[int] = []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([1, 5, 6], lambda polls: _Counter(polls, alive), stop, jobs=2)
    assert alive == []
