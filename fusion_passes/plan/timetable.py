"""The buckets of a module by measured ready times and costs, and when each is sent. Pure.

Gradients of one dtype and device, as nearly all are, get the best buckets that there are
(:mod:`fusion_passes.plan.optimum`). Those of several dtypes or devices share the network, of which
that knows nothing: each kind gets the best buckets that it would have alone, or all of them those
that caps give, whichever end earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch

from fusion_passes.plan.caps import BucketCaps, most_kept_bytes
from fusion_passes.plan.layout import GradientKind, Piece
from fusion_passes.plan.optimum import Queue, best_cuts, times_of
from fusion_passes.profile.records import ReadyTimes
from fusion_passes.profile.tables import CostTable


@dataclass(frozen=True)
class Sent:
    """How gradients of a dtype are sent.

    Attributes:
        itemsize: bytes of an element, as it is sent.
        table: what that costs.
    """

    itemsize: int
    table: CostTable


@dataclass(frozen=True)
class Timetable:
    """Buckets, and when they are sent, in nanoseconds from the start of the backward.

    Attributes:
        buckets: numbers of the parameters of each, in the order in which they are launched.
        sent_ns: start and end of each, by its index; not of sparse gradients.
        compute_ns: when the last gradient is ready.
        end_ns: when the last collective ends.
        fixed_end_ns: when it would end in buckets that are filled up to caps.
        num_kinds: of gradients that share the network.
    """

    buckets: tuple[Piece, ...]
    sent_ns: Mapping[int, tuple[int, int]] = field(repr=False)
    compute_ns: int
    end_ns: int
    fixed_end_ns: int
    num_kinds: int

    def lines(self) -> tuple[str, ...]:
        """What is expected, for people."""
        expected = (
            f"the last gradient is expected at {_ms(self.compute_ns)} of the backward, and the end "
            f"of the last all-reduce {_ms(self.end_ns - self.compute_ns)} later; in buckets filled "
            f"up to caps, {_ms(self.fixed_end_ns - self.compute_ns)} later"
        )
        said = [expected]
        if self.num_kinds > 1:
            said.append(
                f"gradients of {self.num_kinds} kinds share the network: these are the best "
                "buckets that were tried, not the best that there are"
            )
        return tuple(said)


@dataclass(frozen=True)
class _Slot:
    """Gradients of one dtype and device.

    Attributes:
        numbers: of the parameters, in the order in which their gradients are ready.
        positions: of each among the gradients of all slots.
        queue: what decides about their buckets.
    """

    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    queue: Queue


_Cuts: TypeAlias = list[list[int]]
"""Where the gradients of each slot are cut: see :func:`fusion_passes.plan.optimum.best_cuts`."""


def plan_timetable(
    times: ReadyTimes,
    kinds: Mapping[int, GradientKind],
    sent: Mapping[torch.dtype, Sent],
    caps: BucketCaps,
) -> Timetable:
    """Plan the buckets with which the last collective ends earliest.

    Args:
        times: when gradients are ready. Those of which that is not known come last.
        kinds: of all parameters that are trained, by number.
        sent: by dtype, of all that are not sparse.
        caps: those that the user has set bound a bucket of several gradients; all of them say what
            filled buckets would be.
    """
    ready = _in_order(times, kinds)
    of_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in ready:
        if not kinds[number].is_sparse:
            of_kind.setdefault((kinds[number].dtype, kinds[number].device), []).append(number)
    position = {number: place for place, number in enumerate(ready)}
    slots = [
        _Slot(
            tuple(numbers),
            tuple(position[number] for number in numbers),
            _queue(numbers, ready, kinds, sent[dtype], caps),
        )
        for (dtype, _), numbers in of_kind.items()
    ]
    filled = [_filled(slot.numbers, kinds, caps) for slot in slots]
    is_capped = caps.most_bytes is not None or caps.first_most_bytes is not None
    # A bucket that is filled up to a cap goes beyond it; where that is the user's, it must not.
    best = _best(slots, None if is_capped else filled)
    launched: list[tuple[int, Piece, tuple[int, int] | None]] = [
        (position[number], (number,), None) for number in ready if kinds[number].is_sparse
    ]
    for (slot, begin, end), when in _sent(slots, best):
        launched.append((slot.positions[end - 1], slot.numbers[begin:end], when))
    launched.sort(key=lambda item: item[0])
    return Timetable(
        tuple(numbers for _, numbers, _ in launched),
        MappingProxyType({i: when for i, (*_, when) in enumerate(launched) if when is not None}),
        max(ready.values(), default=0),
        _last_end(slots, best),
        _last_end(slots, filled),
        len(slots),
    )


def _in_order(times: ReadyTimes, kinds: Mapping[int, GradientKind]) -> dict[int, int]:
    """When each gradient is ready, in that order."""
    known = zip(times.numbers, times.ready_ns, strict=True)
    ready = {number: moment for number, moment in known if number in kinds}
    last = times.ready_ns[-1]
    return ready | {number: last for number in reversed(list(kinds)) if number not in ready}


def _queue(
    numbers: Sequence[int],
    ready: Mapping[int, int],
    kinds: Mapping[int, GradientKind],
    sent: Sent,
    caps: BucketCaps,
) -> Queue:
    """What decides about the buckets of one dtype and device."""
    kind = kinds[numbers[0]]
    wide, narrow = kind.dtype.itemsize, sent.itemsize * (2 if kind.dtype.is_complex else 1)
    # Larger ones were not measured: where the network is slow, their cost is no line.
    largest = sent.table.num_bytes[-1]

    def as_sent(cap: float | None) -> int:
        return largest if cap is None else int(min(cap / wide * narrow, largest))

    kept = as_sent(most_kept_bytes(kind.device.type))
    most, first = caps.most_bytes, caps.first_most_bytes
    return Queue(
        tuple(ready[number] for number in numbers),
        tuple(kinds[number].numel * narrow for number in numbers),
        sent.table,
        min(kept, as_sent(most)),
        min(kept, as_sent(most if first is None else first)),
    )


def _filled(
    numbers: Sequence[int], kinds: Mapping[int, GradientKind], caps: BucketCaps
) -> list[int]:
    """Where caps cut gradients of one kind."""
    cuts, size = [0], 0
    for place, number in enumerate(numbers, start=1):
        size += kinds[number].nbytes
        if size >= caps.of_bucket(len(cuts) - 1) or place == len(numbers):
            cuts.append(place)
            size = 0
    return cuts


# --- Kinds that share the network ----------------------------------------------------------------


def _best(slots: Sequence[_Slot], filled: _Cuts | None) -> _Cuts:
    """The best buckets of one slot; of several, the best of each or those that caps give."""
    alone = [best_cuts(slot.queue) for slot in slots]
    if len(slots) < 2 or filled is None:
        return alone
    return min(alone, filled, key=lambda cuts: (_last_end(slots, cuts), sum(map(len, cuts))))


def _last_end(slots: Sequence[_Slot], cuts: _Cuts) -> int:
    return max((end for _, (_, end) in _sent(slots, cuts)), default=0)


def _sent(
    slots: Sequence[_Slot], cuts: _Cuts
) -> Iterator[tuple[tuple[_Slot, int, int], tuple[int, int]]]:
    """Buckets in the order of their last gradients, and when each is sent."""
    buckets = [(s, *edge) for s, mine in zip(slots, cuts, strict=True) for edge in pairwise(mine)]
    buckets.sort(key=lambda bucket: bucket[0].positions[bucket[2] - 1])
    times = times_of((slot.queue, begin, end) for slot, begin, end in buckets)
    return zip(buckets, times, strict=True)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
