"""What no way can be faster than, by when gradients are ready and what all-reduces cost. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from fusion_passes.plan.optimum import Queue, best_cuts, times_of
from fusion_passes.profile.tables import NOTHING_TAKEN, CostTable, Taken


def earliest_end(
    ready: Sequence[float],
    num_bytes: Sequence[int],
    costs: CostTable,
    taken: Taken = NOTHING_TAKEN,
) -> float:
    """When the last all-reduce can end at the earliest, in the best buckets that there are.

    Args:
        ready: seconds from the start of a step until each gradient is there.
        num_bytes: of each.
        costs: of an all-reduce.
        taken: what an all-reduce takes from the compute beside it.

    Returns:
        Seconds from the start of the step; 0 without gradients.
    """
    order = sorted(range(len(ready)), key=lambda index: ready[index])
    queue = Queue(
        tuple(round(ready[index] * 1e9) for index in order),
        tuple(num_bytes[index] for index in order),
        costs,
        taken,
    )
    times = times_of((queue, *edge) for edge in pairwise(best_cuts(queue)))
    return max((end for _, end in times), default=0) / 1e9


def ready_shares(
    ready_s: Sequence[Sequence[Sequence[float]]], seconds: Sequence[Sequence[float]]
) -> list[float]:
    """When each gradient is ready on all ranks, as a share of a step.

    Args:
        ready_s: seconds by rank, step and gradient.
        seconds: of the whole step, by rank and step.

    Returns:
        For each gradient the median over steps, of the rank that is last in it.
    """
    shares = [
        [
            [moment / whole for moment in moments]
            for moments, whole in zip(steps, wholes, strict=True)
        ]
        for steps, wholes in zip(ready_s, seconds, strict=True)
    ]
    by_gradient = zip(*(_medians(steps) for steps in shares), strict=True)
    return [max(of_ranks) for of_ranks in by_gradient]


def _medians(steps: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(moments) for moments in zip(*steps, strict=True)]


def lower_bound(
    compute_s: float,
    shares: Sequence[float],
    num_bytes: Sequence[int],
    costs: CostTable,
    taken: Taken = NOTHING_TAKEN,
) -> float:
    """Seconds that a step takes at least: its compute, and the all-reduces that can hide in it.

    Args:
        compute_s: of a step without DDP.
        shares: when each gradient is ready, as a share of that.
        num_bytes: of each gradient.
        costs: of an all-reduce.
        taken: as for :func:`earliest_end`. What it takes after the last gradient is ready is not
            counted, so the bound is one.
    """
    ready = [share * compute_s for share in shares]
    return max(compute_s, earliest_end(ready, num_bytes, costs, taken))
