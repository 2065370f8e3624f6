"""Gradients that are reduced in order, buckets of neighbours, and when these end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_passes.profile.tables import NOTHING_TAKEN, CostTable, Taken


@dataclass(frozen=True)
class Queue:
    """Gradients of one kind that are reduced in order.

    Attributes:
        ready_ns: when each is there, from any start; never less than for the one before.
        num_bytes: what is sent of each.
        earliest: for each, the first one that it may share a bucket with; never less than for the
            one before. All, if empty.
        cap_bytes: most bytes of a bucket of more than one gradient; ``None``: any.
        first_cap_bytes: the same for the first bucket; ``None``: as the others.
    """

    ready_ns: tuple[int, ...]
    num_bytes: tuple[int, ...]
    earliest: tuple[int, ...] = ()
    cap_bytes: int | None = None
    first_cap_bytes: int | None = None

    def without_caps(self) -> Queue:
        """The queue where buckets may have any size."""
        return Queue(self.ready_ns, self.num_bytes, self.earliest)


@dataclass(frozen=True)
class Run:
    """A bucket: neighbours in a queue.

    Attributes:
        begin: number of the first gradient.
        end: one more than that of the last.
        table: number of the table whose kind of collective is cheapest for it.
    """

    begin: int
    end: int
    table: int = 0


@dataclass(frozen=True)
class Optimum:
    """The best buckets of a queue.

    Attributes:
        runs: in order; all gradients are in one.
        end_ns: when the last collective ends; 0 without gradients.
    """

    runs: tuple[Run, ...]
    end_ns: int


def run_ends(
    queue: Queue, runs: Sequence[Run], tables: Sequence[CostTable], taken: Taken = NOTHING_TAKEN
) -> list[int]:
    """When the collective of each bucket ends, in nanoseconds.

    Args:
        queue: the gradients.
        runs: their buckets.
        tables: what each costs.
        taken: what each takes from the compute beside it, by which later gradients are ready later.
    """
    left = [taken.left(table) for table in tables]
    ends: list[int] = []
    free = lost = 0
    for run in runs:
        size = sum(queue.num_bytes[run.begin : run.end])
        mine = taken.of_bytes(size)
        start = max(free, queue.ready_ns[run.end - 1] + lost)
        free = start + left[run.table].cost_ns(size, run.end - run.begin) + mine
        lost += mine
        ends.append(free)
    return ends
