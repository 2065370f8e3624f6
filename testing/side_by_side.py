"""Runs what is in processes of its own, some at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

POLL_S: Final = 0.05

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Outcome_co = TypeVar("Outcome_co", covariant=True)


class Running(Protocol[Outcome_co]):
    """What was started and gives an outcome."""

    def poll(self) -> Outcome_co | None:
        """The outcome, once it is done; its processes have ended then."""

    def discard(self) -> None:
        """End its processes without an outcome."""


def run_side_by_side(
    items: Iterable[Item],
    start: Callable[[Item], Running[Outcome] | None],
    on_outcome: Callable[[Item, Outcome], None],
    *,
    jobs: int,
) -> None:
    """Run items in their order, up to ``jobs`` at a time; end what runs if it is interrupted.

    Args:
        items: what is to be run.
        start: starts one; ``None`` to leave it out.
        on_outcome: called with each item as it is done.
        jobs: how many run at a time.
    """
    waiting, running = list(items), list[tuple[Item, Running[Outcome]]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                item = waiting.pop(0)
                processes = start(item)
                running += [] if processes is None else [(item, processes)]
            for entry in list(running):
                item, processes = entry
                outcome = processes.poll()
                if outcome is not None:
                    running.remove(entry)
                    on_outcome(item, outcome)
            time.sleep(POLL_S)
    finally:
        for _, processes in running:
            processes.discard()
