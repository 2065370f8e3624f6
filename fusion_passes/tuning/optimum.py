"""The buckets with which the last collective ends earliest. Pure, and exact.

Collectives run one at a time, in the order of the gradients, and neighbours may share one. One of
``s`` bytes takes ``C(s)``. With ``r[j]`` when gradient ``j`` is ready where nothing is sent, the
earliest end of the first ``j`` in ``n`` buckets is ``f[0][0] = 0`` and::

    f[n][j] = min over allowed i < j of  max(f[n - 1][i], r[j - 1]) + C(i..j)

Numbers of buckets are tried from 1 on, as long as one more ends anything earlier: of buckets that
end equally early, the fewest take the least from the compute beside them.

Whole nanoseconds and bytes, no floating-point number: each rank gets the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from fusion_passes.tuning.tables import CostTable

_CUTS: Final = 512
"""Of more gradients than these, small neighbours are never cut apart."""

_BUCKETS: Final = 256
"""No more buckets are tried, unless the cap asks for more."""

_NEVER: Final = 2**61
"""A time that no collective ends at; two of them are a number of 64 bits still."""


@dataclass(frozen=True)
class Queue:
    """Gradients that are reduced in order, and what that costs.

    Attributes:
        ready_ns: when each is there if nothing is sent, from any start; never less than for the one
            before.
        num_bytes: what is sent of each.
        costs: of a collective.
        cap_bytes: most bytes of a bucket of more than one gradient.
        first_cap_bytes: the same for the first bucket; ``None``: as for the others.
    """

    ready_ns: tuple[int, ...]
    num_bytes: tuple[int, ...]
    costs: CostTable
    cap_bytes: int = sys.maxsize
    first_cap_bytes: int | None = None

    @functools.cached_property
    def sums(self) -> list[int]:
        """The bytes before each gradient, and of all."""
        return [0, *accumulate(self.num_bytes)]

    @property
    def most_of_first(self) -> int:
        """The cap of the first bucket."""
        return self.cap_bytes if self.first_cap_bytes is None else self.first_cap_bytes

    def may_share(self, begin: int, end: int) -> bool:
        """Whether the gradients from one on, and before another, may be one bucket."""
        cap = self.cap_bytes if begin else self.most_of_first
        return end - begin == 1 or self.sums[end] - self.sums[begin] <= cap


def best_cuts(queue: Queue) -> list[int]:
    """Where to cut a queue into buckets, for the last collective to end earliest; of those that end
    equally early, into the fewest.

    Returns:
        The number of the first gradient of each bucket, and that of all gradients: ``[0]`` without
        any.
    """
    marks = _marks(queue)
    if len(marks) == 1 or len(marks) > 2 * _CUTS:  # Of so many, each is as large as it may be.
        return marks
    search = _Search(queue, marks)
    return [marks[index] for index in search.best()]


def times_of(queue: Queue, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """When the buckets between these cuts are sent: start and end of each, in nanoseconds."""
    times, free = [], 0
    for begin, end in pairwise(cuts):
        start = max(free, queue.ready_ns[end - 1])
        free = start + queue.costs.cost_ns(queue.sums[end] - queue.sums[begin])
        times.append((start, free))
    return times


def _marks(queue: Queue) -> list[int]:
    """Where the queue may be cut: before each gradient, but where these are so many that it would
    take long; there, neighbours of less than a part of the whole stay together."""
    count = len(queue.num_bytes)
    least = queue.sums[-1] // _CUTS if count > _CUTS else 0
    marks = [0]
    for index in range(1, count):
        size = queue.sums[index] - queue.sums[marks[-1]]
        if size >= least or not queue.may_share(marks[-1], index + 1):
            marks.append(index)
    return [*marks, count] if count else marks


class _Search:
    """The recurrence of this module, a number of buckets at a time, with cuts at some marks only.
    Rows of its matrices are where a bucket begins, columns where it ends."""

    def __init__(self, queue: Queue, marks: list[int]) -> None:
        sums = torch.tensor([queue.sums[mark] for mark in marks], device="cpu")
        places = torch.tensor(marks, device="cpu")
        count = places[None, 1:] - places[:-1, None]
        size = sums[None, 1:] - sums[:-1, None]
        is_allowed = size <= queue.cap_bytes
        is_allowed[0] = size[0] <= queue.most_of_first
        is_allowed = (is_allowed | (count == 1)) & (count > 0)
        self._costs = queue.costs.costs_ns(size.clamp(min=0)).where(is_allowed, _NEVER)
        self._ready = torch.tensor([queue.ready_ns[mark - 1] for mark in marks[1:]], device="cpu")

    def best(self) -> list[int]:
        """The numbers of the best marks, the first and the last too."""
        never = torch.full((len(self._costs) + 1,), _NEVER, device="cpu")
        ends, least = [never.clone()], never.clone()
        ends[0][0] = least[0] = 0
        best = 0
        while len(ends) <= len(self._costs) and (not best or len(ends) <= _BUCKETS):
            # As early in fewer buckets is better, whatever follows.
            found = never.clone()
            found[1:] = self._ends(ends[-1]).min(0).values
            found = found.where(found < least, _NEVER)
            if not (found < _NEVER).any():
                break
            least = least.minimum(found)
            ends.append(found)
            best = len(ends) - 1 if found[-1] < _NEVER else best
        return self._marks_of(ends[: best + 1])

    def _ends(self, ends: Tensor) -> Tensor:
        """When a bucket ends, wherever it begins and ends, if those before it end at these times,
        by how many gradients they have."""
        return self._ready.maximum(ends[:-1, None]) + self._costs

    def _marks_of(self, ends: list[Tensor]) -> list[int]:
        """Where buckets that end at the last of these times begin: each as large as it may be."""
        marks = [len(self._costs)]
        for number in range(len(ends) - 1, 0, -1):
            end = marks[-1]
            candidates = self._ends(ends[number - 1])[:, end - 1]
            marks.append(int((candidates == ends[number][end]).nonzero()[0]))
        return marks[::-1]
