"""What the measured values say: ratios with their spread, best caps, and what was to be reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench_steps.results import COMPUTE, NETWORK, Cell, RowResult
from bench_steps.rows import Row
from workloads.ways import AUTO, WAYS

BALANCED = (0.5, 1.5)
"""Network alone over compute alone: where there is something to hide, and room to hide it."""


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and how far they lie apart.

    Attributes:
        low: first quartile.
        middle: median.
        high: third quartile.
    """

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value at least."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, middle, high)

    def over(self, divisor: float) -> Spread:
        return Spread(self.low / divisor, self.middle / divisor, self.high / divisor)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Target:
    """A figure that ours are to reach.

    Attributes:
        words: what it is.
        limit: at most.
        value: what it is; ``None`` where something of it was not measured.
        beyond_spread: whether it counts as reached if the limit lies within the spread.
    """

    words: str
    limit: float
    value: Spread | None
    beyond_spread: bool = False

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        reached = self.value.low if self.beyond_spread else self.value.middle
        return reached <= self.limit


def fastest(results: Iterable[RowResult]) -> RowResult | None:
    """Of those whose gradients are right, by the median."""
    right = [result for result in results if result.is_right]
    return min(right, key=lambda result: statistics.median(result.ratios), default=None)


def defaults(cell: Cell, *, ours: bool) -> list[RowResult]:
    """Rows of the ways that reduce gradients, at their defaults: ours, or all others."""
    rows = [
        cell.find(Row("way", name))
        for name, way in WAYS.items()
        if way.has_ddp and way.is_ours == ours
    ]
    return [result for result in rows if result is not None]


def best_cap(cell: Cell, way: str) -> RowResult | None:
    """The fastest row of a way with a cap, where caps were tried."""
    return fastest(
        result for result in cell.rows if result.row.way == way and result.row.cap_mb is not None
    )


def network_over_compute(cell: Cell) -> float | None:
    """Network alone over compute alone, of the same rounds."""
    network = cell.find(NETWORK)
    return statistics.median(network.ratios) if network and network.ratios else None


def bound_over_compute(cell: Cell, *, contended: bool = False) -> float | None:
    """The lower bound over compute alone, without or with what all-reduces take from compute."""
    bound, compute = cell.lower_bound_s(contended=contended), cell.find(COMPUTE)
    if bound is None or compute is None:
        return None
    return bound / statistics.median(compute.seconds)


def is_balanced(cell: Cell) -> bool:
    """Whether network and compute are about equal, :data:`BALANCED`."""
    share = network_over_compute(cell)
    return share is not None and BALANCED[0] <= share <= BALANCED[1]


def cpu_over_limits(cell: Cell, result: RowResult) -> Spread | None:
    """CPU seconds of a step over those of compute alone and network alone together."""
    limits = [cell.find(row) for row in (COMPUTE, NETWORK)]
    if not result.cpu_s or not all(limit and limit.cpu_s for limit in limits):
        return None
    return Spread.of(result.cpu_s).over(
        sum(statistics.median(limit.cpu_s) for limit in limits if limit)
    )


def peak_over_compute(cell: Cell, result: RowResult) -> float | None:
    """Peak memory of a step over that of compute alone."""
    compute = cell.find(COMPUTE)
    if not result.peak_bytes or compute is None or not compute.peak_bytes:
        return None
    return result.peak_bytes / compute.peak_bytes


def warm_over_compute(cell: Cell, result: RowResult) -> float | None:
    """Warm start over that of compute alone."""
    compute = cell.find(COMPUTE)
    if result.warm_s is None or compute is None or compute.warm_s is None:
        return None
    return result.warm_s / compute.warm_s


def over(result: RowResult, other: RowResult) -> Spread:
    """One row over another, round by round: each is a ratio to compute alone of its round."""
    pairs = zip(result.ratios, other.ratios, strict=False)
    return Spread.of([mine / theirs for mine, theirs in pairs])


def targets(cell: Cell) -> list[Target]:
    """What ours are to reach in a cell; the best of ours at its default."""
    ours = fastest(defaults(cell, ours=True))
    theirs = fastest(defaults(cell, ours=False))
    if ours is None:
        return []
    against = over(ours, theirs) if theirs else None
    torchs = f"over the best of torch's ways ({theirs.row.label})" if theirs else "over torch's"
    found = [Target(torchs, 1.0, against, beyond_spread=True)]
    if is_balanced(cell):
        found.append(Target("the same, where compute and network are balanced", 0.85, against))
        for contended, words in ((False, "lower bound"), (True, "lower bound with contention")):
            bound = bound_over_compute(cell, contended=contended)
            over_bound = Spread.of(ours.ratios).over(bound) if bound else None
            found.append(Target(f"over the {words}", 1.10, over_bound))
    found += _targets_of_auto(cell)
    cpu = "CPU seconds over compute alone and network alone"
    found.append(Target(cpu, 1.05, cpu_over_limits(cell, ours)))
    peak, warm = peak_over_compute(cell, ours), warm_over_compute(cell, ours)
    found.append(Target("peak memory over compute alone", 1.02, _exact(peak)))
    found.append(Target("warm start over compute alone", 1.2, _exact(warm)))
    return found


def _targets_of_auto(cell: Cell) -> list[Target]:
    """What buckets that are chosen from measurement are to reach."""
    auto = cell.find(Row("way", AUTO))
    if auto is None or not auto.is_right:
        return []
    capped = {name: best_cap(cell, name) for name, way in WAYS.items() if way.caps}
    found = []
    for is_ours, words, limit in ((True, "our", 1.0), (False, "torch's", _of_torchs(cell))):
        rows = [row for name, row in capped.items() if row and WAYS[name].is_ours == is_ours]
        best = fastest([*rows, *(r for r in defaults(cell, ours=is_ours) if r is not auto)])
        if rows and best is not None:
            name = f"auto over {words} fastest at its best cap ({best.row.label})"
            found.append(Target(name, limit, over(auto, best), beyond_spread=True))
    return found


def _of_torchs(cell: Cell) -> float:
    return 0.95 if is_balanced(cell) else 1.0


def _exact(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, value, value)
