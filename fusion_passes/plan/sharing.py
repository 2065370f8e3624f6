"""Buckets of several kinds of gradients that share a network. Pure.

Buckets of each kind interleave, and the best of some candidates is taken: each kind planned for
itself, all kinds cut at the same places, and the buckets that fixed caps give, each improved by
merging neighbours. That is never worse than those caps by these costs, but nobody has shown it to
be the best. One kind alone gets the best buckets that there are, those of
:mod:`fusion_passes.plan.optimum`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from fusion_passes.plan.contended import best_runs_beside
from fusion_passes.plan.queue import Queue, Run
from fusion_passes.profile.tables import NOTHING_TAKEN, CostTable, Taken

_MERGED_AT_MOST: Final = 256
"""Buckets of a candidate with more are not merged further: it would take long."""


@dataclass(frozen=True)
class Slot:
    """Gradients that may share buckets: of one key and level.

    Attributes:
        positions: of each in the order in which all kinds become ready.
        queue: the same gradients, with when they are ready.
        table: what their collectives cost.
        taken: what each takes from the compute beside it; the same in all slots.
    """

    positions: tuple[int, ...]
    queue: Queue
    table: CostTable
    taken: Taken = NOTHING_TAKEN

    def costs(self, run: Run) -> tuple[int, int]:
        """What a bucket costs, and what of that it takes from compute."""
        size = sum(self.queue.num_bytes[run.begin : run.end])
        mine = self.taken.of_bytes(size)
        return self._left.cost_ns(size, run.end - run.begin) + mine, mine

    @functools.cached_property
    def _left(self) -> CostTable:
        return self.taken.left(self.table)

    def best(self) -> list[Run]:
        return list(best_runs_beside(self.queue, [self.table], self.taken).runs)

    def may_merge(self, one: Run, other: Run) -> bool:
        """Whether two neighbours may be one bucket."""
        queue = self.queue
        if queue.earliest and one.begin < queue.earliest[other.end - 1]:
            return False
        first = one.begin == 0 and queue.first_cap_bytes is not None
        cap = queue.first_cap_bytes if first else queue.cap_bytes
        return cap is None or sum(queue.num_bytes[one.begin : other.end]) <= cap


Runs = list[list[Run]]
"""The buckets of each slot."""


def best_of(slots: Sequence[Slot], given: Runs | None) -> Runs:
    """The best buckets of one slot, or the best that are tried of several."""
    alone = [slot.best() for slot in slots]
    if len(slots) == 1:
        return alone
    candidates = [alone, _cut_together(slots), *([given] if given is not None else [])]
    merged = [_merged(slots, runs) for runs in candidates]
    return min(merged, key=lambda runs: (last_end(slots, runs), sum(map(len, runs))))


def last_end(slots: Sequence[Slot], runs: Runs) -> int:
    """When the last collective ends."""
    return max((end for *_, end in times_of(slots, runs)), default=0)


def times_of(slots: Sequence[Slot], runs: Runs) -> Iterator[tuple[int, int, int, int]]:
    """When each bucket is sent, in nanoseconds: the number of its slot, of its first gradient, its
    start and its end. They are launched in the order of their last gradients."""
    launches = sorted(
        (slot.positions[run.end - 1], number, run.begin)
        for number, slot in enumerate(slots)
        for run in runs[number]
    )
    by_begin = [{run.begin: run for run in mine} for mine in runs]
    free = lost = 0
    for _, number, begin in launches:
        slot, run = slots[number], by_begin[number][begin]
        start = max(free, slot.queue.ready_ns[run.end - 1] + lost)
        cost, mine = slot.costs(run)
        free = start + cost
        lost += mine
        yield number, begin, start, free


def _cut_together(slots: Sequence[Slot]) -> Runs:
    """All kinds planned as one, and cut where that is cut."""
    order = sorted(
        (position, number, index)
        for number, slot in enumerate(slots)
        for index, position in enumerate(slot.positions)
    )
    largest = max(slots, key=lambda slot: sum(slot.queue.num_bytes))
    together = Queue(
        tuple(accumulate((slots[n].queue.ready_ns[i] for _, n, i in order), max)),
        tuple(slots[n].queue.num_bytes[i] for _, n, i in order),
    )
    best = best_runs_beside(together, [largest.table], largest.taken)
    edges = [run.end for run in best.runs]
    runs: Runs = [[] for _ in slots]
    begins = [0 for _ in slots]
    ends = [0 for _ in slots]
    for place, (_, number, index) in enumerate(order, start=1):
        slot, run = slots[number], Run(begins[number], ends[number])
        if run.end > run.begin and not slot.may_merge(run, Run(index, index + 1)):
            runs[number].append(run)
            begins[number] = index
        ends[number] = index + 1
        if place in edges:
            for n, end in enumerate(ends):
                if end > begins[n]:
                    runs[n].append(Run(begins[n], end))
                    begins[n] = end
    return runs


def _merged(slots: Sequence[Slot], runs: Runs) -> Runs:
    """Merge neighbours, one after another, wherever the last collective ends no later."""
    if sum(map(len, runs)) > _MERGED_AT_MOST:
        return runs
    end = last_end(slots, runs)
    for number, slot in enumerate(slots):
        index = 0
        while index + 1 < len(runs[number]):
            mine = runs[number]
            one, other = mine[index : index + 2]
            joined = [*mine[:index], Run(one.begin, other.end), *mine[index + 2 :]]
            trial = [joined if n == number else runs[n] for n in range(len(slots))]
            if slot.may_merge(one, other) and (reached := last_end(slots, trial)) <= end:
                runs, end = trial, reached
            else:
                index += 1
    return runs
