"""What no way can be faster than, by when gradients are ready and what all-reduces cost. Pure."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class CostTable:
    """Seconds of one all-reduce by its size, as measured.

    Attributes:
        num_bytes: sizes, growing.
        seconds: for each; never less for more bytes.
    """

    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, num_bytes: Sequence[int], seconds: Sequence[float]) -> CostTable:
        """A table from what was measured. Where more bytes took less time, this is noise: the
        bound stays one with the lower of both."""
        falling = accumulate(reversed(seconds), min)
        return cls(tuple(num_bytes), tuple(reversed(list(falling))))

    def cost(self, num_bytes: int) -> float:
        """Seconds, between two sizes by a line, beyond the last by its bytes a second."""
        if num_bytes <= self.num_bytes[0]:
            return self.seconds[0]
        if num_bytes >= self.num_bytes[-1]:
            return self.seconds[-1] * num_bytes / self.num_bytes[-1]
        i = bisect.bisect_left(self.num_bytes, num_bytes)
        low, high = self.num_bytes[i - 1], self.num_bytes[i]
        share = (num_bytes - low) / (high - low)
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])


def table_sizes(gradient_bytes: int) -> tuple[int, ...]:
    """Sizes to measure for a model, in bytes: powers of four from 4 KiB, less than its whole."""
    sizes = [4096]
    while sizes[-1] * 4 < gradient_bytes:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def earliest_end(ready: Sequence[float], num_bytes: Sequence[int], costs: CostTable) -> float:
    """When the last all-reduce can end at the earliest.

    One all-reduce runs at a time, in the order in which gradients are ready, and neighbours may
    share one. With prefix sums S of the bytes, f[0] = 0 and

        f[j] = min over i < j of max(f[i], ready[j]) + cost(S[j] - S[i])

    which is exact for every cost that never falls with size.

    Args:
        ready: seconds from the start of a step until each gradient is there.
        num_bytes: of each.
        costs: of an all-reduce.

    Returns:
        Seconds from the start of the step; 0 without gradients.
    """
    order = sorted(range(len(ready)), key=lambda index: ready[index])
    sums = [0, *accumulate(num_bytes[index] for index in order)]
    ends = [0.0]
    for j, index in enumerate(order, start=1):
        moment = ready[index]
        ends.append(min(max(ends[i], moment) + costs.cost(sums[j] - sums[i]) for i in range(j)))
    return ends[-1]


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
    compute_s: float, shares: Sequence[float], num_bytes: Sequence[int], costs: CostTable
) -> float:
    """Seconds that a step takes at least: its compute, and the all-reduces that can hide in it.

    Args:
        compute_s: of a step without DDP.
        shares: when each gradient is ready, as a share of that.
        num_bytes: of each gradient.
        costs: of an all-reduce.
    """
    ready = [share * compute_s for share in shares]
    return max(compute_s, earliest_end(ready, num_bytes, costs))
