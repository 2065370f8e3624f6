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

from fusion_passes.plan.queue import Optimum, Queue, Run
from fusion_passes.profile.tables import CostTable, Piece

_TRIED: Final = 16
"""How many larger buckets are tried, before the first that was found is taken."""


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
    search = Search(queue, tables)
    search.extend()
    return Optimum(tuple(reversed(search.choose())), search.ends[-1])


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
        while self.entered < min(j, len(ends)) and sums[j] - sums[self.entered] > piece.above:
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


class Search:
    """The recurrence of this module, a gradient at a time; of any number of buckets, or of at most
    one more than another search has found.

    Attributes:
        ends: for each number of gradients, the earliest end of their collectives; of as many as
            there may be in that number of buckets.
    """

    def __init__(
        self, queue: Queue, tables: Sequence[CostTable], before: Search | None = None
    ) -> None:
        self.ends = [0]
        self._before = before
        self._sources = self.ends if before is None else before.ends
        self._queue = queue
        self._tables = tables
        self._ready = [*accumulate(queue.ready_ns, max)]
        self._sums = [0, *accumulate(queue.num_bytes)]
        self._chosen: list[Run | None] = []
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

    def extend(self) -> None:
        """Find the earliest ends, of 1 gradient and more."""
        for j in range(1, len(self._queue.num_bytes) + 1):
            candidates = self._candidates(j)
            if not candidates:
                break
            end, i, table = min(candidates)
            self.ends.append(end)
            self._chosen.append(Run(i, j, table) if i >= 0 else None)

    def _candidates(self, j: int) -> list[tuple[int, int, int]]:
        """List ends of ``j`` gradients, with where the last bucket begins, and the number of its
        table; -1 for both where it has been found in fewer buckets."""
        ends, ready = self._sources, self._ready[j - 1]
        known = min(j, len(ends))
        candidates: list[tuple[int, int, int]] = []
        if self._before is not None and j < len(ends):
            candidates.append((ends[j], -1, -1))
        elif self._may_be_first(j):
            cost, table = self._cost(0, j)
            candidates.append((ready + cost, 0, table))
        # Of the sources that end before the gradient is ready, the last has the smallest bucket.
        while self._idle + 1 < known and ends[self._idle + 1] <= ready:
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
        return candidates

    def fewest(self) -> list[Run]:
        """The buckets that end earliest in the number that was searched, in order."""
        runs: list[Run] = []
        search, j = self, len(self.ends) - 1
        while j:
            run, before = search._chosen[j - 1], search._before
            assert before is not None, "nothing takes no bucket"
            if run is not None:
                runs.append(run)
                j = run.begin
            search = before
        return runs[::-1]

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
        assert known is not None, "it was found here"
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
