"""The buckets with which the last collective ends earliest. Pure, and exact.

One collective runs at a time, in the order of the gradients, and neighbours may share one. With
``r[j]`` when gradient ``j`` is ready, and ``C(i, j)`` the cost of one collective of the gradients
from ``i`` on and before ``j``, the earliest end of the first ``j`` is ``f[0] = 0`` and::

    f[j] = min over allowed i < j of  max(f[i], r[j - 1]) + C(i, j)

which is exact for every cost that never falls with bytes or tensors. A table is made of lines, and
for those of its sources ``i`` that end after ``r[j - 1]`` the minimum over a line is that of a
window which only moves on: all of it takes L times the number of lines, not L squared.

Whole nanoseconds and bytes, no floating-point number: each rank gets the same.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from fusion_passes.profile.tables import CostTable, Piece

_TRIED: Final = 16
"""How many larger buckets are tried, before the first that was found is taken."""


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


def best_runs(queue: Queue, tables: Sequence[CostTable]) -> Optimum:
    """The buckets with which the last collective ends earliest.

    Of those that end equally early, they are few: from the last one on, each bucket is as large as
    half of the time allows that it has to spare. The other half is left for ready times that are
    estimates.

    Args:
        queue: at most some 100,000 gradients.
        tables: what a bucket costs with each kind of collective; the cheapest is taken, the first
            one of equal ones.

    Raises:
        ValueError: there is no table.
    """
    if not tables:
        raise ValueError("best_runs needs the cost of a collective, but got no table. Give one.")
    search = _Search(queue, tables)
    for j in range(1, len(queue.num_bytes) + 1):
        search.extend(j)
    return Optimum(tuple(reversed(search.choose())), search.ends[-1])


def held_from(num_bytes: Sequence[int], hold_bytes: int) -> list[int]:
    """For each gradient the first one that it may share a bucket with, where a bucket is closed
    once this many bytes of gradients became ready since its first one.

    Args:
        num_bytes: of all gradients that become ready, in order.
        hold_bytes: the bound.
    """
    sums = [0, *accumulate(num_bytes)]
    return [
        min(bisect.bisect_right(sums, sums[j] - hold_bytes, 0, j + 1), j)
        for j in range(len(num_bytes))
    ]


def run_ends(
    queue: Queue, runs: Sequence[Run], tables: Sequence[CostTable], taken_per_mille: int = 0
) -> list[int]:
    """When the collective of each bucket ends, in nanoseconds.

    Args:
        queue: the gradients.
        runs: their buckets.
        tables: what each costs.
        taken_per_mille: what collectives take from the compute beside them, by which gradients are
            ready later.
    """
    ends: list[int] = []
    free = busy = 0
    for run in runs:
        size = sum(queue.num_bytes[run.begin : run.end])
        cost = tables[run.table].cost_ns(size, run.end - run.begin)
        ready = queue.ready_ns[run.end - 1] + taken_per_mille * busy // 1000
        free = max(free, ready) + cost
        busy += cost
        ends.append(free)
    return ends


@dataclass
class _Line:
    """A line of a table, and the sources whose bucket up to the gradient in question lies on it:
    those that can still become the best one, by their number.

    Attributes:
        table: number of the table.
        tensor_ns: of the table.
        entered: the next source that has not been seen.
    """

    table: int
    piece: Piece
    tensor_ns: int
    entered: int = 1
    sources: deque[tuple[int, int]] = field(default_factory=deque)

    def best(self, j: int, least: int, sums: Sequence[int], ends: Sequence[int]) -> int | None:
        """The source with the least ``ends[i] + cost``, not before ``least``; the first one of
        equal ones. ``None`` if there is none."""
        piece, sources = self.piece, self.sources
        while self.entered < j and sums[j] - sums[self.entered] > piece.above:
            i = self.entered
            self.entered += 1
            # What differs between sources of the end times the run: exact, where a slope is not.
            value = (ends[i] - self.tensor_ns * i) * piece.run_bytes - piece.rise_ns * sums[i]
            while sources and sources[-1][1] > value:
                sources.pop()
            sources.append((i, value))
        while sources and (sources[0][0] < least or sums[j] - sums[sources[0][0]] > piece.up_to):
            sources.popleft()
        return sources[0][0] if sources else None


class _Search:
    """The recurrence of this module, a gradient at a time.

    Attributes:
        ends: for each number of gradients, the earliest end of their collectives.
    """

    def __init__(self, queue: Queue, tables: Sequence[CostTable]) -> None:
        self.ends = [0]
        self._queue = queue
        self._tables = tables
        self._ready = [*accumulate(queue.ready_ns, max)]
        self._sums = [0, *accumulate(queue.num_bytes)]
        self._chosen: list[Run] = []
        self._idle = 0
        self._lines = [
            _Line(number, piece, table.tensor_ns)
            for number, table in enumerate(tables)
            for piece in table.pieces()
        ]

    def _least(self, j: int) -> int:
        """The first source that a bucket up to gradient ``j`` may begin with, other than the first
        bucket of all."""
        queue, sums = self._queue, self._sums
        least = queue.earliest[j - 1] if queue.earliest else 0
        if queue.cap_bytes is not None:
            least = max(least, bisect.bisect_left(sums, sums[j] - queue.cap_bytes))
        return min(least, j - 1)

    def _may_be_first(self, j: int) -> bool:
        """Whether the gradients before ``j`` may be one bucket, the first."""
        queue = self._queue
        if j == 1:
            return True
        cap = queue.cap_bytes if queue.first_cap_bytes is None else queue.first_cap_bytes
        held = queue.earliest[j - 1] > 0 if queue.earliest else False
        return not held and (cap is None or self._sums[j] <= cap)

    def _cost(self, i: int, j: int) -> tuple[int, int]:
        """The cost of a bucket, and the number of the table that it is from."""
        size = self._sums[j] - self._sums[i]
        return min((t.cost_ns(size, j - i), n) for n, t in enumerate(self._tables))

    def extend(self, j: int) -> None:
        """Find the earliest end of ``j`` gradients, given those of fewer."""
        ends, ready = self.ends, self._ready[j - 1]
        candidates: list[tuple[int, int, int]] = []
        if self._may_be_first(j):
            cost, table = self._cost(0, j)
            candidates.append((ready + cost, 0, table))
        # Of the sources that end before the gradient is ready, the last has the smallest bucket.
        while self._idle + 1 < j and ends[self._idle + 1] <= ready:
            self._idle += 1
        least = max(self._least(j), 1)
        if self._idle >= least:
            cost, table = self._cost(self._idle, j)
            candidates.append((ready + cost, self._idle, table))
        least = max(least, self._idle + 1)
        for line in self._lines:
            i = line.best(j, least, self._sums, ends)
            if i is not None:
                cost = line.piece.cost_ns(self._sums[j] - self._sums[i])
                cost += line.tensor_ns * (j - i - 1)
                candidates.append((ends[i] + cost, i, line.table))
        end, i, table = min(candidates)
        ends.append(end)
        self._chosen.append(Run(i, j, table))

    def choose(self) -> list[Run]:
        """The buckets that end when the last one can, from the last one on."""
        runs: list[Run] = []
        j = len(self.ends) - 1
        deadline = self.ends[-1]
        while j:
            run = self._largest(j, deadline)
            runs.append(run)
            spare = deadline - self._cost(run.begin, j)[0] - self.ends[run.begin]
            deadline = self.ends[run.begin] + spare // 2
            j = run.begin
        return runs

    def _largest(self, j: int, deadline: int) -> Run:
        """A large bucket up to gradient ``j`` that ends by a time."""
        ready = self._ready[j - 1]
        known = self._chosen[j - 1]
        if self._may_be_first(j):
            cost, table = self._cost(0, j)
            if ready + cost <= deadline:
                return Run(0, j, table)
        least = max(self._least(j), 1)
        # Buckets that take too long even if they begin at once need not be tried.
        sources = range(least, known.begin)
        begin = least + bisect.bisect_left(
            sources, ready - deadline, key=lambda i: -self._cost(i, j)[0]
        )
        for i in range(begin, min(known.begin, begin + _TRIED)):
            cost, table = self._cost(i, j)
            if max(self.ends[i], ready) + cost <= deadline:
                return Run(i, j, table)
        return known
