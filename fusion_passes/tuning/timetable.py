"""The buckets of a module by measured ready times and costs, and when each is sent. Pure: all its
gradients in buckets are of one dtype and device; see :mod:`fusion_passes.tuning.optimum`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from fusion_passes.layout.caps import BucketCaps, most_kept_bytes
from fusion_passes.layout.layout import GradientKind, Piece, plan_layout
from fusion_passes.tuning.optimum import Queue, best_cuts, times_of
from fusion_passes.tuning.records import ReadyTimes
from fusion_passes.tuning.tables import CostTable


@dataclass(frozen=True)
class Timetable:
    """Buckets, and when they are sent, in nanoseconds from the start of the backward.

    Attributes:
        buckets: numbers of the parameters of each, in the order in which they are launched.
        sent_ns: start and end of each, by its index; not of sparse gradients.
        compute_ns: when the last gradient is ready.
        end_ns: when the last collective ends.
        fixed_end_ns: when it would end in buckets that are filled up to caps.
    """

    buckets: tuple[Piece, ...]
    sent_ns: Mapping[int, tuple[int, int]] = field(repr=False)
    compute_ns: int
    end_ns: int
    fixed_end_ns: int

    def __str__(self) -> str:
        return (
            f"the last gradient is expected at {_ms(self.compute_ns)} of the backward, and the end "
            f"of the last all-reduce {_ms(self.end_ns - self.compute_ns)} later; in buckets filled "
            f"up to caps, {_ms(self.fixed_end_ns - self.compute_ns)} later"
        )


def plan_timetable(
    times: ReadyTimes,
    kinds: Mapping[int, GradientKind],
    itemsize: int,
    table: CostTable,
    caps: BucketCaps,
) -> Timetable:
    """Plan the buckets with which the last collective ends earliest. Gradients without a ready time
    come last. ``itemsize`` is that of an element as it is sent. Caps that the user has set bound a
    bucket of several gradients; all of them say what filled buckets would be."""
    ready = _in_order(times, kinds)
    numbers = [number for number in ready if not kinds[number].is_sparse]
    queue = _queue(numbers, ready, kinds, itemsize, table, caps)
    cuts = best_cuts(queue)
    sent = times_of(queue, cuts)
    by_caps = plan_layout([(number,) for number in numbers], kinds, caps).buckets
    filled = accumulate((len(bucket.numbers) for bucket in by_caps), initial=0)
    # In the order of the last gradients: those of sparse ones beside them.
    place = {number: index for index, number in enumerate(ready)}
    launched = {(number,): None for number in ready if kinds[number].is_sparse} | {
        tuple(numbers[begin:end]): when
        for (begin, end), when in zip(pairwise(cuts), sent, strict=True)
    }
    buckets = tuple(sorted(launched, key=lambda bucket: place[bucket[-1]]))
    return Timetable(
        buckets,
        {i: when for i, bucket in enumerate(buckets) if (when := launched[bucket]) is not None},
        max(ready.values()),
        sent[-1][1],
        times_of(queue, filled)[-1][1],
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
    itemsize: int,
    table: CostTable,
    caps: BucketCaps,
) -> Queue:
    kind = kinds[numbers[0]]
    wide, narrow = kind.dtype.itemsize, itemsize * (2 if kind.dtype.is_complex else 1)
    # Larger ones were not measured: where the network is slow, their cost is no line.
    largest = table.num_bytes[-1]

    def as_sent(cap: float | None) -> int:
        return largest if cap is None else int(min(cap / wide * narrow, largest))

    kept = as_sent(most_kept_bytes(kind.device.type))
    most, first = caps.most_bytes, caps.first_most_bytes
    return Queue(
        tuple(ready[number] for number in numbers),
        tuple(kinds[number].numel * narrow for number in numbers),
        table,
        min(kept, as_sent(most)),
        min(kept, as_sent(most if first is None else first)),
    )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
