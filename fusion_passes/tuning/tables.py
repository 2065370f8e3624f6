"""Tables of what a collective costs by its size. Pure; whole nanoseconds, so that all ranks that
have the same table decide alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

MOST_NS: Final = 24 * 60 * 60 * 10**9
"""A day. What is longer was not measured, and sums of it would not fit in 64 bits."""


@dataclass(frozen=True)
class CostTable:
    """Nanoseconds of one collective by its size.

    Between two sizes the cost is a line, below the first it is that of the first, and beyond the
    last it grows with the bytes. It never falls with size.

    Attributes:
        num_bytes: sizes, growing, greater than 0.
        times_ns: for each; never less for more bytes.

    Raises:
        ValueError: the sizes do not grow, or a time falls or is negative.
    """

    num_bytes: tuple[int, ...]
    times_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes, times = self.num_bytes, self.times_ns
        if not sizes or len(sizes) != len(times):
            raise ValueError(f"{len(sizes)} sizes have {len(times)} times")
        if sizes[0] <= 0 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"sizes do not grow from above 0: {sizes}")
        if times[0] < 0 or any(b < a for a, b in pairwise(times)):
            raise ValueError(f"times fall, or are below 0: {times}")
        if times[-1] > MOST_NS:
            raise ValueError(f"a collective takes more than a day: {times}")

    @classmethod
    def of(cls, num_bytes: Sequence[int], seconds: Sequence[float]) -> CostTable:
        """A table from what was measured for growing sizes. Where more bytes took less time, which
        is noise, the lower of both counts."""
        times = [max(round(value * 1e9), 0) for value in seconds]
        falling = [*accumulate(reversed(times), min)]
        return cls(tuple(num_bytes), tuple(reversed(falling)))

    def cost_ns(self, num_bytes: int) -> int:
        """What a collective of so many bytes costs, in nanoseconds."""
        return int(self.costs_ns(torch.tensor(num_bytes, device="cpu")))

    def costs_ns(self, num_bytes: Tensor) -> Tensor:
        """The same for a tensor of sizes: int64, of any shape, on the CPU."""
        sizes, times = self._corners
        index = torch.bucketize(num_bytes, sizes, right=True).clamp(1, len(sizes) - 1)
        run, rise = sizes.diff()[index - 1], times.diff()[index - 1]
        beyond = num_bytes - sizes[index - 1]
        # As rise * beyond // run, whose product can be too large for 64 bits.
        return times[index - 1] + rise // run * beyond + rise % run * beyond // run

    @functools.cached_property
    def _corners(self) -> tuple[Tensor, Tensor]:
        """Sizes and times between which the cost is a line; beyond the last two it goes on."""
        sizes, times = self.num_bytes, self.times_ns
        return (
            torch.tensor((0, *sizes, 2 * sizes[-1]), device="cpu"),
            torch.tensor((times[0], *times, 2 * times[-1]), device="cpu"),
        )

    def __str__(self) -> str:
        least, most = (
            f"{self.num_bytes[end] / 1024:g} KiB in {self.times_ns[end] / 1e6:.2f} ms"
            for end in (0, -1)
        )
        return f"{least}, {most}"
