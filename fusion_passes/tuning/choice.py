"""The layouts that ``"auto"`` compares, and the choice by measured steps. Pure.

In a *turn*, some steps run with one layout. In a *lap*, first the default layout takes a turn, then
each other layout that is left. Its *ratio* is the median time of its steps over the default's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Final

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Kinds, Layout, Piece, lay_out, plan_layout

PIECES: Final = 8  # Divisor of the cap of a piece.
FACTORS: Final = (0.25, 0.5, 2, 4)  # Factors of the caps. Smaller steps are within the spread.
SMALLER: Final = 4  # Divisor of the cap of a smaller first or last bucket.
TURN: Final = 4  # Steps. The first one, which allocates the memory of new buckets, is not timed.
AFTER_LAP: Final = 2  # Steps with the default, during which ranks exchange the times of a lap.
MOST_STEPS: Final = 100
LEAST_LAPS: Final = 3
FINALISTS: Final = 3  # How many layouts other than the default take part after the first lap.
LEAST_GAIN: Final = 0.02  # Share of a step; processes of equal buckets differ by as much.
DEFAULT: Final = 0  # Index of the default layout.


def piece_caps(caps: BucketCaps) -> BucketCaps:
    """The caps of the pieces from which buckets with ``caps``, and smaller ones, are made."""
    size = max(min([caps.cap_bytes, *caps.listed_bytes]) // PIECES, 1)
    return BucketCaps(min(caps.first_bytes, size), size)


def candidates(pieces: Sequence[Piece], kinds: Kinds, caps: BucketCaps) -> dict[str, Layout]:
    """The layouts by name: the default first, then others of the same pieces, without duplicates.
    If the user has set the caps, no layout has larger ones."""
    found = {"default": plan_layout(pieces, kinds, caps)}
    for factor in (factor for factor in FACTORS if factor < 1 or not caps.are_given):
        cap, *listed = (int(each * factor) for each in (caps.cap_bytes, *caps.listed_bytes))
        scaled = BucketCaps(min(caps.first_bytes, cap), cap, tuple(listed))
        found[f"caps x {factor:g}"] = plan_layout(pieces, kinds, scaled)
    first = replace(caps, first_bytes=caps.first_bytes // SMALLER)
    found["smaller first bucket"] = plan_layout(pieces, kinds, first)
    # Filled from the last piece on, so that the smaller cap is that of the last bucket.
    least = min([caps.cap_bytes, *caps.listed_bytes])
    filled = plan_layout(pieces[::-1], kinds, BucketCaps(least // SMALLER, least)).buckets[::-1]
    buckets = sorted(filled, key=lambda bucket: kinds[bucket.numbers[0]].is_delayed)
    found["smaller last bucket"] = lay_out([[bucket.numbers] for bucket in buckets], kinds)
    groups = {name: tuple(frozenset(b.numbers) for b in found[name].buckets) for name in found}
    first_of = {buckets: name for name, buckets in reversed(groups.items())}
    return {name: found[name] for name in found if first_of[groups[name]] == name}


@dataclass
class Contest:
    """The comparison of ``count`` layouts. ``laps`` has the median seconds of a step, by layout."""

    count: int
    laps: list[Mapping[int, float]] = field(default_factory=list)

    def next_lap(self) -> list[int]:
        """The layouts other than the default that take part in the next lap; empty at the end."""
        others = self._fastest_first()[: FINALISTS if self.laps else None]
        if len(self.laps) > 1:
            others = [index for index in others if median(self.ratios(index)) < 1]
        fastest = [min((DEFAULT, *others), key=lap.__getitem__) for lap in self.laps]
        is_ahead = self.choice != DEFAULT and set(fastest) == {self.choice}
        steps = sum(TURN * len(lap) + AFTER_LAP for lap in (*self.laps, (DEFAULT, *others)))
        if is_ahead or steps > MOST_STEPS:
            return []
        # In the other direction in every second lap: a layout may slow down the next one.
        return sorted(others, reverse=len(self.laps) % 2 == 1)

    @property
    def choice(self) -> int:
        """The fastest layout, if it beats the default beyond the spread: three quarters of its
        ratios are below 1, and their median is a gain. Else the default."""
        best = next(iter(self._fastest_first()), DEFAULT)
        if best == DEFAULT or len(self.laps) < LEAST_LAPS:
            return DEFAULT
        _, middle, third_quartile = quantiles(self.ratios(best), n=4, method="inclusive")
        return best if third_quartile < 1 and middle <= 1 - LEAST_GAIN else DEFAULT

    def ratios(self, index: int) -> list[float]:
        """The ratios of a layout, by lap."""
        return [lap[index] / lap[DEFAULT] for lap in self.laps if index in lap]

    def _fastest_first(self) -> list[int]:
        """The layouts of the last lap other than the default."""
        left = {*(self.laps[-1] if self.laps else range(self.count))} - {DEFAULT}
        return sorted(left, key=lambda index: median(self.ratios(index) or [1]))
