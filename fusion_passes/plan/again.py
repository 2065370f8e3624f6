"""Whether a module's buckets are worth planning once more, when steps of it were measured. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fusion_passes.plan.corrected import corrected
from fusion_passes.plan.queue import Run
from fusion_passes.plan.sharing import Runs, Slot, best_of, last_end
from fusion_passes.profile.steps import MeasuredSteps

WORTH_PER_MILLE: Final = 50
"""Other buckets are tried if the last all-reduce of a backward is predicted to end earlier by this
part of the time until then. A second compile costs seconds, and by less the times of equal steps
differ anyway."""


@dataclass(frozen=True)
class ChosenFrom:
    """What a module's buckets were chosen from, in a graph of this module alone.

    Attributes:
        slots: the gradients of each kind, with when they were taken to be ready.
        numbers: the numbers of their parameters.
        estimates: when each of these gradients is ready where nothing was measured, in nanoseconds.
    """

    slots: tuple[Slot, ...]
    numbers: tuple[tuple[int, ...], ...]
    estimates: tuple[tuple[int, ...], ...]

    def digest(self) -> str:
        """Equal where the same measurement gives the same buckets; 16 hexadecimal digits."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Forecast:
    """What measured ready times predict.

    Attributes:
        first_ns: when the last all-reduce ends in the buckets that ran.
        second_ns: when it ends in the best ones.
    """

    first_ns: int
    second_ns: int

    @property
    def is_worth_it(self) -> bool:
        """Whether the best buckets are to be tried."""
        return (self.first_ns - self.second_ns) * 1000 >= WORTH_PER_MILLE * self.first_ns > 0


def forecast(chosen_from: ChosenFrom, measured: MeasuredSteps) -> Forecast | None:
    """Predict, from measured ready times, when the last all-reduce ends.

    Args:
        chosen_from: what the buckets were chosen from that were measured.
        measured: these buckets, and when they were ready.

    Returns:
        ``None`` where the steps were of other gradients, or of other buckets than a plan makes.
    """
    by_number = {
        number: estimate
        for numbers, estimates in zip(chosen_from.numbers, chosen_from.estimates, strict=True)
        for number, estimate in zip(numbers, estimates, strict=True)
    }
    ready = corrected(by_number, measured)
    if ready is None:
        return None
    ran = _as_runs(chosen_from.numbers, measured.buckets)
    if ran is None:
        return None
    slots = [
        replace(slot, queue=replace(slot.queue, ready_ns=tuple(ready[n] for n in numbers)))
        for slot, numbers in zip(chosen_from.slots, chosen_from.numbers, strict=True)
    ]
    return Forecast(last_end(slots, ran), last_end(slots, best_of(slots, None)))


def _as_runs(numbers: Sequence[Sequence[int]], buckets: Sequence[Sequence[int]]) -> Runs | None:
    """Buckets as runs of each kind; ``None`` where one is no run."""
    place = {n: (kind, i) for kind, mine in enumerate(numbers) for i, n in enumerate(mine)}
    runs: Runs = [[] for _ in numbers]
    for bucket in buckets:
        kinds = {place[number][0] for number in bucket}
        places = [place[number][1] for number in bucket]
        if len(kinds) != 1 or max(places) - min(places) != len(bucket) - 1:
            return None
        runs[kinds.pop()].append(Run(min(places), max(places) + 1))
    return [sorted(mine, key=lambda run: run.begin) for mine in runs]
