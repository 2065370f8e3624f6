"""Tables of what a collective costs by its size. Pure; whole nanoseconds, so that all ranks that
have the same table decide alike."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

SMALLEST_BYTES: Final = 1024
"""The smallest size that is measured: below it, a collective costs its latency."""

MIB: Final = 2**20


@dataclass(frozen=True)
class Piece:
    """A part of a table in which the cost is a line.

    Attributes:
        above: sizes greater than this, in bytes.
        up_to: and at most this; infinite for the last piece.
        base_ns: the cost at ``from_bytes``.
        from_bytes: where the line begins.
        rise_ns: by how much it rises,
        run_bytes: over this many bytes.
    """

    above: int
    up_to: float
    base_ns: int
    from_bytes: int
    rise_ns: int
    run_bytes: int

    def cost_ns(self, num_bytes: int) -> int:
        return self.base_ns + self.rise_ns * (num_bytes - self.from_bytes) // self.run_bytes


@dataclass(frozen=True)
class CostTable:
    """Nanoseconds of one collective by its size.

    Between two sizes the cost is a line, below the first it is that of the first, and beyond the
    last it grows with the bytes. It never falls with size.

    Attributes:
        num_bytes: sizes, growing, greater than 0.
        times_ns: for each; never less for more bytes.
        tensor_ns: further nanoseconds for each tensor but the first, in a collective of several.

    Raises:
        ValueError: the sizes do not grow, or a time falls or is negative.
    """

    num_bytes: tuple[int, ...]
    times_ns: tuple[int, ...]
    tensor_ns: int = 0

    def __post_init__(self) -> None:
        sizes, times = self.num_bytes, self.times_ns
        if not sizes or len(sizes) != len(times):
            raise ValueError(
                f"CostTable needs one time for each size, but has {len(sizes)} sizes and "
                f"{len(times)} times. Give as many of both, at least one."
            )
        if sizes[0] <= 0 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(
                f"CostTable.num_bytes must grow from above 0, but is {sizes}. Sort the sizes."
            )
        if times[0] < 0 or self.tensor_ns < 0 or any(b < a for a, b in pairwise(times)):
            raise ValueError(
                f"CostTable.times_ns must never fall and be at least 0, but is {times} and "
                f"{self.tensor_ns} for each further tensor. Make it with CostTable.of."
            )

    @classmethod
    def of(
        cls, num_bytes: Sequence[int], seconds: Sequence[float], tensor_s: float = 0.0
    ) -> CostTable:
        """A table from what was measured. Where more bytes took less time, this is noise, and the
        lower of both counts.

        Args:
            num_bytes: sizes, growing.
            seconds: for each.
            tensor_s: further seconds for each tensor but the first.
        """
        times = [max(round(value * 1e9), 0) for value in seconds]
        falling = [*accumulate(reversed(times), min)]
        return cls(tuple(num_bytes), tuple(reversed(falling)), max(round(tensor_s * 1e9), 0))

    def cost_ns(self, num_bytes: int, num_tensors: int = 1) -> int:
        """What a collective costs, in nanoseconds.

        Args:
            num_bytes: of all that is sent.
            num_tensors: in how many tensors, at least 1.
        """
        sizes, times = self.num_bytes, self.times_ns
        more = self.tensor_ns * (num_tensors - 1)
        if num_bytes <= sizes[0]:
            return times[0] + more
        if num_bytes >= sizes[-1]:
            return times[-1] + times[-1] * (num_bytes - sizes[-1]) // sizes[-1] + more
        i = bisect.bisect_left(sizes, num_bytes)
        rise = (times[i] - times[i - 1]) * (num_bytes - sizes[i - 1])
        return times[i - 1] + rise // (sizes[i] - sizes[i - 1]) + more

    def pieces(self) -> tuple[Piece, ...]:
        """The lines that the table consists of, by size."""
        sizes, times = self.num_bytes, self.times_ns
        first = Piece(-1, sizes[0], times[0], sizes[0], 0, 1)
        between = [
            Piece(sizes[i], sizes[i + 1], times[i], sizes[i], times[i + 1] - times[i], run)
            for i, run in enumerate(b - a for a, b in pairwise(sizes))
        ]
        last = Piece(sizes[-1], math.inf, times[-1], sizes[-1], times[-1], sizes[-1])
        return (first, *between, last)

    def fit(self) -> Fit:
        """The line that fits the table best, for people; nothing is decided from it."""
        return fit_line(self.num_bytes, self.times_ns)


@dataclass(frozen=True)
class Taken:
    """What a collective takes from the compute beside it: a line over its bytes.

    A thread of Gloo takes cycles to begin one, and to add each byte; NCCL takes multiprocessors.

    Attributes:
        each_ns: nanoseconds of compute, of any collective.
        mib_ns: further ones for each MiB.

    Raises:
        ValueError: one of them is negative.
    """

    each_ns: int = 0
    mib_ns: int = 0

    def __post_init__(self) -> None:
        if min(self.each_ns, self.mib_ns) < 0:
            raise ValueError(
                f"Taken.each_ns and Taken.mib_ns must be at least 0, but are {self.each_ns} and "
                f"{self.mib_ns}. Make it with Taken.of."
            )

    @classmethod
    def of(cls, num_bytes: tuple[int, int], seconds: tuple[float, float]) -> Taken:
        """The line through two measurements; where it would begin below 0, or fall, it is the
        nearest one that does not.

        Args:
            num_bytes: of a small and a large collective, the latter at least as large.
            seconds: of compute that each has taken.
        """
        small, large = num_bytes
        of_small, of_large = (max(value, 0.0) for value in seconds)
        rise = (of_large - of_small) / (large - small) if large > small else of_large / large
        rise = min(max(rise, 0.0), of_large / large)
        begin = max(of_large - rise * large, 0.0)
        return cls(round(begin * 1e9), round(rise * MIB * 1e9))

    def of_bytes(self, num_bytes: int) -> int:
        """What a collective takes, in nanoseconds of compute.

        Args:
            num_bytes: of all that is sent.
        """
        return self.each_ns + self.mib_ns * num_bytes // MIB

    def left(self, table: CostTable) -> CostTable:
        """What a collective costs beyond what it takes from compute. Where that would fall with
        size, as where more bytes were measured to cost no more, it stays as it is.

        Args:
            table: of costs.
        """
        pairs = zip(table.num_bytes, table.times_ns, strict=True)
        left = accumulate((max(time - self.of_bytes(size), 0) for size, time in pairs), max)
        return CostTable(table.num_bytes, tuple(left), table.tensor_ns)

    def __str__(self) -> str:
        return f"{self.each_ns / 1e6:.2f} ms and {self.mib_ns / 1e6:.2f} ms for each MiB"


NOTHING_TAKEN: Final = Taken()
"""Where collectives run beside no compute, or on what does none of it."""


@dataclass(frozen=True)
class Fit:
    """A cost of ``alpha + beta * bytes``.

    Attributes:
        alpha_us: microseconds of any collective.
        gbytes_per_s: gigabytes a second, 1 / beta; infinite where the cost does not grow.
        error: the greatest relative error over the table's sizes.
    """

    alpha_us: float
    gbytes_per_s: float
    error: float

    def __str__(self) -> str:
        return (
            f"{self.alpha_us:.0f} us + bytes / {self.gbytes_per_s:.3g} GB/s "
            f"(within {self.error:.0%})"
        )


def fit_line(num_bytes: Sequence[int], times_ns: Sequence[int]) -> Fit:
    """The line with the least squares of relative errors; neither its start nor its slope is
    negative.

    Args:
        num_bytes: sizes.
        times_ns: of each.
    """
    points = [(size, time) for size, time in zip(num_bytes, times_ns, strict=True) if time]
    if not points:
        return Fit(0.0, math.inf, 0.0)
    # Relative errors: each point weighs 1 / time^2.
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    xx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    xy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    beta = max(xy / xx, 0.0) if xx else 0.0
    alpha = mean_y - beta * mean_x
    if alpha < 0:
        squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        products = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
        alpha, beta = 0.0, products / squares
    error = max(abs(alpha + beta * x - y) / y for x, y in points)
    return Fit(alpha / 1e3, 1 / beta if beta else math.inf, error)


def table_sizes(total_bytes: int, growth: int = 2) -> tuple[int, ...]:
    """Sizes to measure for gradients of a size, in bytes: from the smallest, less than the whole.

    Args:
        total_bytes: of all gradients.
        growth: of each size over the one before.
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * growth < total_bytes:
        sizes.append(sizes[-1] * growth)
    return tuple(sizes)
