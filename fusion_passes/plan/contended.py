"""The buckets with which the last collective ends earliest, where collectives take a share of the
compute beside them. Pure.

While a collective runs, compute advances by ``1 - c`` of the time, so a gradient is ready later by
``c`` times what the network was busy before. By a clock that advances with the compute, a
collective takes ``(1 - c) C``, and with ``P`` when the last one ends by that clock, it really ends
at ``P + c (C(0) + C(1) + ...)``: many small buckets can end earlier by that clock, and cost more.

For a fixed deadline ``D`` of ``P``, the cheapest buckets have one recurrence, from the last
gradient on, with ``S[j]`` the least cost of the gradients from ``j`` on::

    S[j] = min over allowed k > j with r[k - 1] + (1 - c) (C(j, k) + S[k]) <= D  of  C(j, k) + S[k]

since what costs less also leaves more time before it. Deadlines are tried between the earliest one
that can be kept and that of the cheapest buckets, until no other can be better by a thousandth, or
so many were tried. All times are counted in thousandths of a nanosecond, which are whole numbers.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

from fusion_passes.plan.optimum import Optimum, Queue, Run, best_runs, run_ends
from fusion_passes.profile.tables import CostTable, Piece

_TRIED_WORK: Final = 100_000
"""How many gradients all deadlines together may have that are tried; two are, in any case."""


def best_runs_beside(queue: Queue, tables: Sequence[CostTable], taken_per_mille: int) -> Optimum:
    """The buckets with which the last collective ends earliest, to a thousandth; see
    :func:`fusion_passes.plan.optimum.best_runs`.

    Args:
        queue: the gradients, with when they are ready where nothing is sent.
        tables: what a bucket costs with each kind of collective.
        taken_per_mille: what collectives take from the compute beside them.
    """
    if not taken_per_mille or not queue.num_bytes:
        return best_runs(queue, tables)
    left = 1000 - taken_per_mille
    by_compute = replace(queue, ready_ns=tuple(1000 * ready for ready in queue.ready_ns))
    shorter = [
        replace(
            table,
            times_ns=tuple(left * time for time in table.times_ns),
            tensor_ns=left * table.tensor_ns,
        )
        for table in tables
    ]
    earliest = best_runs(by_compute, shorter)
    search = _Deadlines(queue, tables, left)
    return search.best(earliest)


@dataclass
class _Line:
    """A line of a table, and the ends of buckets that lie on it: those that can still become the
    best for a bucket that begins earlier."""

    table: int
    piece: Piece
    tensor_ns: int
    entered: int
    ends: deque[tuple[int, int]] = field(default_factory=deque)


class _Deadlines:
    """The cheapest buckets for each deadline."""

    def __init__(self, queue: Queue, tables: Sequence[CostTable], left: int) -> None:
        self._queue = queue
        self._tables = tables
        self._left = left
        self._ready = [1000 * ready for ready in accumulate(queue.ready_ns, max)]
        self._sums = [0, *accumulate(queue.num_bytes)]
        self._count = len(queue.num_bytes)

    def best(self, earliest: Optimum) -> Optimum:
        """The best buckets over all deadlines.

        Args:
            earliest: the buckets that end earliest by the clock of the compute, with that end.
        """
        taken = 1000 - self._left
        cheapest = self._cheapest(None)
        assert cheapest is not None, "without a deadline there are always buckets"
        known = [earliest.runs, cheapest]
        ends = [self._end(runs) for runs in known]
        latest, least = max(self._by_compute(cheapest), earliest.end_ns), self._cost_of(cheapest)
        # Each entry: what nothing between two deadlines can be better than, and these.
        intervals = [(earliest.end_ns + taken * least, earliest.end_ns, latest, least)]
        for _ in range(_TRIED_WORK // self._count):
            bound, low, high, least = heapq.heappop(intervals) if intervals else (0, 0, 0, 0)
            if high - low < 2 or bound + bound // 1000 >= 1000 * min(ends):
                break
            middle = (low + high) // 2
            runs = self._cheapest(middle)
            if runs is None:  # By a rounding: only what ends later can be.
                heapq.heappush(intervals, (middle + taken * least, middle, high, least))
                continue
            known.append(runs)
            ends.append(self._end(runs))
            cost = self._cost_of(runs)
            heapq.heappush(intervals, (middle + taken * least, middle, high, least))
            reached = min(self._by_compute(runs), middle)
            heapq.heappush(intervals, (low + taken * cost, low, reached, cost))
        # Of equal ends the first: its small buckets leave time to spare.
        number = min(range(len(known)), key=lambda index: ends[index])
        return Optimum(tuple(known[number]), ends[number])

    def _end(self, runs: Sequence[Run]) -> int:
        return run_ends(self._queue, runs, self._tables, 1000 - self._left)[-1]

    def _cost_of(self, runs: Sequence[Run]) -> int:
        return sum(self._cost(run.begin, run.end)[0] for run in runs)

    def _by_compute(self, runs: Sequence[Run]) -> int:
        """When the last collective ends by the clock of the compute, in thousandths."""
        free = 0
        for run in runs:
            free = max(free, self._ready[run.end - 1])
            free += self._left * self._cost(run.begin, run.end)[0]
        return free

    def _cost(self, begin: int, end: int) -> tuple[int, int]:
        size = self._sums[end] - self._sums[begin]
        return min((t.cost_ns(size, end - begin), n) for n, t in enumerate(self._tables))

    def _cheapest(self, deadline: int | None) -> tuple[Run, ...] | None:
        """The cheapest buckets that end by a deadline of the compute's clock, in thousandths of a
        nanosecond; ``None`` if there are none."""
        costs: list[int | None] = [None] * self._count + [0]
        chosen: list[tuple[int, int]] = [(0, 0)] * self._count
        lines = [
            _Line(number, piece, table.tensor_ns, self._count)
            for number, table in enumerate(self._tables)
            for piece in table.pieces()
        ]
        last = self._count
        for begin in reversed(range(self._count)):
            while last > begin + 1 and not self._may_share(begin, last):
                last -= 1
            candidates = [
                found
                for line in lines
                if (found := self._best_on(line, begin, last, deadline, costs)) is not None
            ]
            if not begin:
                candidates = self._firsts(deadline, costs)
            if candidates:
                cost, back, table = min(candidates)
                costs[begin], chosen[begin] = cost, (-back, table)
        if costs[0] is None:
            return None
        runs, begin = list[Run](), 0
        while begin < self._count:
            end, table = chosen[begin]
            runs.append(Run(begin, end, table))
            begin = end
        return tuple(runs)

    def _may_share(self, begin: int, end: int) -> bool:
        """Whether a bucket other than the first may be these gradients."""
        queue, size = self._queue, self._sums[end] - self._sums[begin]
        held = bool(queue.earliest) and begin < queue.earliest[end - 1]
        return not held and (queue.cap_bytes is None or size <= queue.cap_bytes)

    def _in_time(self, end: int, cost: int, deadline: int | None) -> bool:
        return deadline is None or self._ready[end - 1] + self._left * cost <= deadline

    def _best_on(
        self, line: _Line, begin: int, last: int, deadline: int | None, costs: Sequence[int | None]
    ) -> tuple[int, int, int] | None:
        """The cheapest bucket from a gradient on that lies on a line of a table, with all that
        follow: their cost, the bucket's end (the larger of equal ones first), the table."""
        piece, ends, sums = line.piece, line.ends, self._sums
        while line.entered > begin and sums[line.entered] - sums[begin] > piece.above:
            end = line.entered
            line.entered -= 1
            rest = costs[end]
            if rest is None:
                continue
            # What differs between ends of the cost times the run: exact, where a slope is not.
            value = (rest + line.tensor_ns * end) * piece.run_bytes + piece.rise_ns * sums[end]
            while ends and ends[-1][1] > value:
                ends.pop()
            ends.append((end, value))
        while ends:
            end = ends[0][0]
            size, rest = sums[end] - sums[begin], costs[end]
            assert rest is not None, "only such ends are entered"
            if end <= last and size <= piece.up_to:
                cost = piece.cost_ns(size) + line.tensor_ns * (end - begin - 1) + rest
                if self._in_time(end, cost, deadline):
                    return cost, -end, line.table
            ends.popleft()  # Buckets that begin earlier are larger, and later.
        return None

    def _firsts(
        self, deadline: int | None, costs: Sequence[int | None]
    ) -> list[tuple[int, int, int]]:
        """All first buckets, as in :meth:`_best_on`: they have a cap of their own."""
        queue = self._queue
        cap = queue.cap_bytes if queue.first_cap_bytes is None else queue.first_cap_bytes
        # Whatever is larger than one that must not be, must not be either.
        most = self._count if cap is None else bisect.bisect_right(self._sums, cap) - 1
        found = []
        for end in range(1, self._count + 1):
            rest = costs[end]
            held = bool(queue.earliest) and queue.earliest[end - 1] > 0
            if rest is None or (end > 1 and (held or end > most)):
                continue
            cost, table = self._cost(0, end)
            if self._in_time(end, cost + rest, deadline):
                found.append((cost + rest, -end, table))
        return found
