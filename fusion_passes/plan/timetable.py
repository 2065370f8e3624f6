"""The buckets of a module by measured ready times and costs, and when each is sent. Pure.

Gradients of one dtype and device, as nearly all are, get the best buckets that there are
(:mod:`fusion_passes.plan.contended`), those of several the best that are tried
(:mod:`fusion_passes.plan.sharing`).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

import torch

from fusion_passes.plan.caps import BucketCaps, most_kept_bytes
from fusion_passes.plan.layout import Kind, Piece, plan_layout
from fusion_passes.plan.queue import Queue, Run
from fusion_passes.plan.sharing import Runs, Slot, best_of, last_end, times_of
from fusion_passes.profile.ready_times import ReadyTimes
from fusion_passes.profile.tables import NOTHING_TAKEN, CostTable, Taken

_Key: TypeAlias = tuple[torch.dtype, torch.device]


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
        uncapped_end_ns: when it would end without the user's caps; ``None`` if there are none.
        num_kinds: of gradients that share the network.
    """

    buckets: tuple[Piece, ...]
    sent_ns: Mapping[int, tuple[int, int]] = field(repr=False)
    compute_ns: int
    end_ns: int
    fixed_end_ns: int
    uncapped_end_ns: int | None
    num_kinds: int

    def lines(self) -> tuple[str, ...]:
        """What is expected, for people."""
        expected = (
            f"the last gradient is expected at {_ms(self.compute_ns)} of the backward, and the end "
            f"of the last all-reduce {_ms(self.end_ns - self.compute_ns)} later; in buckets filled "
            f"up to caps, {_ms(self.fixed_end_ns - self.compute_ns)} later"
        )
        said = [expected]
        if self.uncapped_end_ns is not None:
            cost = self.end_ns - self.uncapped_end_ns
            costs = f"{_ms(cost)} of that" if cost > 0 else "nothing"
            said.append(f"your bucket cap costs {costs}")
        if self.num_kinds > 1:
            said.append(
                f"gradients of {self.num_kinds} kinds share the network: these are the best "
                "buckets that were tried, not the best that there are"
            )
        return tuple(said)


def plan_timetable(
    times: ReadyTimes,
    kinds: Mapping[int, Kind],
    sent: Mapping[torch.dtype, Sent],
    caps: BucketCaps,
    taken: Taken = NOTHING_TAKEN,
) -> Timetable:
    """Plan the buckets with which the last collective ends earliest.

    Args:
        times: when gradients are ready. Those of which that is not known come last.
        kinds: of all parameters that are trained, by number.
        sent: by dtype, of all that are not sparse.
        caps: those that the user has set bound a bucket of several gradients; all of them say what
            filled buckets would be.
        taken: what each collective takes from the compute beside it.
    """
    ready = _in_order(times, kinds)
    position = {number: place for place, number in enumerate(ready)}
    members: dict[_Key, list[int]] = {}
    for number in ready:
        if not kinds[number].is_sparse:
            members.setdefault((kinds[number].dtype, kinds[number].device), []).append(number)
    slots = [
        _slot(numbers, position, ready, kinds, sent[dtype], caps, taken)
        for (dtype, _), numbers in members.items()
    ]
    by_slot = list(members.values())
    filled = _filled(by_slot, ready, kinds, caps)
    free = [replace(slot, queue=slot.queue.without_caps()) for slot in slots]
    is_capped = any(slot.queue != other.queue for slot, other in zip(slots, free, strict=True))
    # A bucket that is filled up to a cap goes beyond it; where that is the user's, it must not.
    runs = best_of(slots, None if is_capped else filled) if slots else []
    launched: list[tuple[int, Piece, tuple[int, int] | None]] = [
        (position[number], (number,), None) for number in ready if kinds[number].is_sparse
    ]
    ends = {(slot, run.begin): run.end for slot, mine in enumerate(runs) for run in mine}
    for slot, begin, start_ns, end_ns in times_of(slots, runs):
        numbers = tuple(by_slot[slot][begin : ends[slot, begin]])
        launched.append((position[numbers[-1]], numbers, (start_ns, end_ns)))
    launched.sort(key=lambda item: item[0])
    return Timetable(
        tuple(numbers for _, numbers, _ in launched),
        MappingProxyType({i: when for i, (*_, when) in enumerate(launched) if when is not None}),
        max(ready.values(), default=0),
        last_end(slots, runs),
        last_end(slots, filled),
        last_end(free, best_of(free, filled)) if is_capped else None,
        len(slots),
    )


def _in_order(times: ReadyTimes, kinds: Mapping[int, Kind]) -> dict[int, int]:
    """When each gradient is ready, in that order."""
    known = zip(times.numbers, times.ready_ns, strict=True)
    ready = {number: moment for number, moment in known if number in kinds}
    last = times.ready_ns[-1]
    return ready | {number: last for number in reversed(list(kinds)) if number not in ready}


def _slot(
    numbers: Sequence[int],
    position: Mapping[int, int],
    ready: Mapping[int, int],
    kinds: Mapping[int, Kind],
    sent: Sent,
    caps: BucketCaps,
    taken: Taken,
) -> Slot:
    """What decides about the buckets of one dtype and device."""
    kind = kinds[numbers[0]]
    wide, narrow = kind.dtype.itemsize, sent.itemsize * (2 if kind.dtype.is_complex else 1)
    sizes = [kinds[number].numel * narrow for number in numbers]
    # Larger ones were not measured: where the network is slow, their cost is no line.
    kept = most_kept_bytes(kind.device.type)
    most = min(kept / wide * narrow, sent.table.num_bytes[-1])
    sums = [0, *accumulate(sizes)]
    earliest = tuple(
        min(bisect.bisect_left(sums, sums[j + 1] - most), j) for j in range(len(numbers))
    )

    def as_sent(cap: int | None) -> int | None:
        return None if cap is None else cap // wide * narrow

    queue = Queue(
        tuple(ready[number] for number in numbers),
        tuple(sizes),
        earliest,
        as_sent(caps.most_bytes),
        as_sent(caps.first_most_bytes),
    )
    return Slot(tuple(position[number] for number in numbers), queue, sent.table, taken)


def _filled(
    by_slot: Sequence[Sequence[int]],
    order: Mapping[int, int],
    kinds: Mapping[int, Kind],
    caps: BucketCaps,
) -> Runs:
    """The buckets that caps give, of each slot."""
    place = {n: (slot, i) for slot, numbers in enumerate(by_slot) for i, n in enumerate(numbers)}
    runs: Runs = [[] for _ in by_slot]
    for bucket in plan_layout([(number,) for number in order], kinds, caps).buckets:
        if not bucket.is_sparse:
            slot = place[bucket.numbers[0]][0]
            places = [place[number][1] for number in bucket.numbers]
            runs[slot].append(Run(min(places), max(places) + 1))
    return runs


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
