"""The buckets with which the last collective ends earliest, where collectives take from the compute
beside them. Pure.

A collective of ``C`` that takes ``X`` from the compute makes all gradients after it later by ``X``.
By a clock that advances with the compute it takes ``W = C - X``, and with ``P`` when the last one
ends by that clock, it really ends at ``P + X(0) + X(1) + ...``: many small buckets can end earlier
by that clock, and cost more. ``X`` is a line over bytes, so that all ``X`` together are so much for
each bucket, and a constant. For each number of buckets the best ones are then those that end
earliest by the clock of the compute, and of at most ``n`` that is, with ``r[j]`` when gradient
``j`` is ready::

    f[n][j] = min of f[n - 1][j]
                 and min over allowed i < j of  max(f[n - 1][i], r[j - 1]) + W(i, j)

Numbers are tried from 1 on, until a further bucket takes more than all that can be gained: no
buckets end before those of :func:`fusion_passes.plan.optimum.best_runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fusion_passes.plan.optimum import Search, best_runs
from fusion_passes.plan.queue import Optimum, Queue, run_ends
from fusion_passes.profile.tables import CostTable, Taken

_TRIED_WORK: Final = 1_000_000
"""How many gradients, times the lines of tables, all numbers of buckets may have that are tried:
some seconds."""

_DEARER: Final = (1, 4)
"""To begin with, buckets are found whose collectives take longer by so many times what each takes
from compute: with one the best, where the network is never idle."""


def best_runs_beside(queue: Queue, tables: Sequence[CostTable], taken: Taken) -> Optimum:
    """The buckets with which the last collective ends earliest, to a nanosecond for each bucket;
    see :func:`fusion_passes.plan.optimum.best_runs`. Where thousands of gradients are best in many,
    not all numbers of buckets are tried, and the best of those that are is taken.

    Args:
        queue: the gradients, with when they are ready where nothing is sent.
        tables: what a bucket costs with each kind of collective.
        taken: what a collective takes from the compute beside it.
    """
    left = [taken.left(table) for table in tables]
    earliest = best_runs(queue, left)
    if not queue.num_bytes:
        return earliest
    if not taken.each_ns:  # What is taken is the same in any buckets.
        return Optimum(earliest.runs, run_ends(queue, earliest.runs, tables, taken)[-1])
    dearer = [best_runs(queue, _dearer(left, taken, times)).runs for times in _DEARER]
    found = [earliest.runs, *dearer]
    ends = [run_ends(queue, runs, tables, taken)[-1] for runs in found]
    search, count = Search(queue, left), len(queue.num_bytes)
    tried = _TRIED_WORK // (count * sum(len(table.num_bytes) + 1 for table in tables))
    # As many as end earliest are not better in another way.
    for number in range(1, min(len(earliest.runs), tried + 1)):
        # What is rounded down for each bucket counts for them.
        least = earliest.end_ns + taken.of_bytes(sum(queue.num_bytes)) - number
        if least + (number - 1) * taken.each_ns >= min(ends):
            break
        search = Search(queue, left, search)
        search.extend()
        if len(search.ends) > count:
            found.append(tuple(search.fewest()))
            ends.append(run_ends(queue, found[-1], tables, taken)[-1])
    best = min(range(len(found)), key=lambda index: (ends[index], len(found[index])))
    return Optimum(found[best], ends[best])


def _dearer(left: Sequence[CostTable], taken: Taken, times: int) -> list[CostTable]:
    """Make tables in which each collective costs more by what it takes, so many times."""
    more = times * taken.each_ns
    return [replace(table, times_ns=tuple(t + more for t in table.times_ns)) for table in left]
