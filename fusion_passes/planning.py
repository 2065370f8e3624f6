"""Decides which gradient reductions share a bucket. Pure: reads the graph, changes nothing.

The same graph and caps give the same plan on every rank: what decides is the order of the graph,
dtypes, sizes and group names, never rank, time, hash order or a measurement made here.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import torch
from torch import fx

from fusion_passes.agreement import number_runs
from fusion_passes.caps import ALONG_SHARE, BucketCaps
from fusion_passes.collectives import issue_order
from fusion_passes.config import ScalingOption
from fusion_passes.dependencies import reduction_levels, write_positions
from fusion_passes.kernels import is_library_kernel, stores_unscaled
from fusion_passes.reductions import GradientReduction, ReductionKey, Rejection, dtype_name
from fusion_passes.scaling import BucketScaling, choose_scaling
from fusion_passes.sources import source_of


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks of all buckets.

    Attributes:
        scaling: where gradients are scaled.
        reduce_dtype: in which wider floating-point gradients are sent; ``None``: in their own.
            What a communication hook has cast already is sent as it is.
    """

    scaling: ScalingOption = "auto"
    reduce_dtype: torch.dtype | None = None


DEFAULT_OPTIONS: Final = PlanOptions()

CapsOf = Callable[[str], BucketCaps]
"""The caps of the DDP module that owns a group name."""


@dataclass(frozen=True)
class Bucket:
    """Reductions that are fused into one collective.

    Attributes:
        key: what they have in common.
        members: in the order in which they become ready.
        cap_bytes: the cap under which the bucket was filled.
        scaling: where its gradients are scaled.
    """

    key: ReductionKey
    members: tuple[GradientReduction, ...]
    cap_bytes: int
    scaling: BucketScaling

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the collective reduces."""
        return self.num_bytes // self.key.dtype.itemsize * self.key.reduce_dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send: such a bucket stays as it was traced."""
        return self.num_bytes == 0


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are launched, and what is left alone."""

    buckets: tuple[Bucket, ...]
    rejections: tuple[Rejection, ...]

    def describe(self) -> str:
        """The plan for people: one line a bucket, one a rejection."""
        lines = [
            f"bucket {index}: {len(bucket.members)} gradients, {bucket.num_bytes} bytes, "
            f"cap {bucket.cap_bytes}, {bucket.key}, scaled: {bucket.scaling.way}: "
            + ", ".join(member.owner.parameter for member in bucket.members)
            for index, bucket in enumerate(self.buckets)
        ]
        lines += [f"left alone: {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def collectives(self, kind: str) -> dict[str, str]:
        """What each DDP module is going to launch, by the name of its group, in order. Equal texts
        on two ranks are collectives that match.

        Args:
            kind: of all collectives, ``"concat"`` for instance.
        """
        texts: dict[str, list[str]] = {}
        for bucket in self.buckets:
            key, numbers = bucket.key, [member.owner.number for member in bucket.members]
            dtype = dtype_name(key.reduce_dtype)
            text = f"{bucket.scaling.reduce_op} {dtype} {number_runs(numbers)}"
            texts.setdefault(key.group_name, [kind]).append(text)
        return {name: "; ".join(lines) for name, lines in texts.items()}

    def digest(self) -> str:
        """Equal for equal plans, in every process; 16 hexadecimal digits."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]


@dataclass
class _OpenBucket:
    caps: BucketCaps
    cap_bytes: int
    opened_at: int
    members: list[GradientReduction] = field(default_factory=list)
    num_bytes: int = 0
    overwritten_at: float = math.inf
    filled_by: int | None = None
    """How many library kernels are in front of the reduction that brought the bucket to its cap."""
    along_bytes: int = 0

    def must_close(self, ready_bytes: int, position: int, kernels: int) -> bool:
        """Whether the bucket must be launched before a reduction at ``position``, which has
        ``kernels`` library kernels in front of it."""
        held_too_long = ready_bytes - self.opened_at >= self.caps.hold_bytes
        late = self.filled_by is not None and self.filled_by < kernels
        return held_too_long or late or self.overwritten_at < position

    def takes(self, num_bytes: int) -> bool:
        """Whether there is room for a reduction."""
        along = self.along_bytes + num_bytes
        return self.filled_by is None or along * ALONG_SHARE < self.cap_bytes

    def add(self, reduction: GradientReduction, kernels: int, overwritten_at: float) -> None:
        if self.filled_by is not None:
            self.along_bytes += reduction.num_bytes
        self.members.append(reduction)
        self.num_bytes += reduction.num_bytes
        self.overwritten_at = min(self.overwritten_at, overwritten_at)
        if self.filled_by is None and self.num_bytes >= self.cap_bytes:
            self.filled_by = kernels


def plan_buckets(
    graph: fx.Graph,
    reductions: Sequence[GradientReduction],
    caps_of: CapsOf,
    rejections: Sequence[Rejection] = (),
    options: PlanOptions = DEFAULT_OPTIONS,
) -> BucketPlan:
    """Fills buckets in the order in which the reductions become ready.

    Reductions share a bucket if their keys are equal and so are their levels, neighbours in the
    graph or not. The level of a reduction is the number of buckets that must be reduced, one
    after the other, before its gradient exists (0 for nearly all), so no bucket can come to wait
    for itself. A bucket is closed before anything overwrites a gradient that it holds. A full one
    takes along small gradients that are ready before the next library kernel runs: the bias beside
    its weight, which would begin the next bucket, or be one of its own behind the last.

    Args:
        graph: the graph that holds the reductions.
        reductions: in graph order.
        caps_of: the caps for a key's group name.
        rejections: the collectives that are left alone, in graph order. They keep their order,
            which can make a gradient depend on a reduction that it does not read.
        options: what the user asks of all buckets.
    """
    reductions = [_in_reduce_dtype(reduction, options.reduce_dtype) for reduction in reductions]
    overwritten_at = _overwritten_at(graph, reductions)
    levels = reduction_levels(
        graph,
        {reduction.wait: reduction.start for reduction in reductions},
        issue_order(rejection.node for rejection in rejections),
    )
    kernels_before = [*accumulate((is_library_kernel(node) for node in graph.nodes), initial=0)]
    closed = _fill(reductions, levels, overwritten_at, kernels_before, caps_of, options)
    closed.sort(key=lambda bucket: bucket.members[-1].position)
    return BucketPlan(tuple(closed), tuple(rejections))


def _fill(
    reductions: Sequence[GradientReduction],
    levels: Mapping[fx.Node, int],
    overwritten_at: Mapping[GradientReduction, float],
    kernels_before: Sequence[int],
    caps_of: CapsOf,
    options: PlanOptions,
) -> list[Bucket]:
    """The buckets, in no order."""
    closed: list[Bucket] = []
    open_buckets: dict[tuple[ReductionKey, int], _OpenBucket] = {}
    opened: Counter[ReductionKey] = Counter()
    ready_bytes = 0
    for reduction in reductions:
        kernels = kernels_before[reduction.position]
        slot = (reduction.key, levels[reduction.start])
        done = [
            other
            for other, bucket in open_buckets.items()
            if bucket.must_close(ready_bytes, reduction.position, kernels)
            or (other == slot and not bucket.takes(reduction.num_bytes))
        ]
        closed += [_close(other[0], open_buckets.pop(other), options) for other in done]
        bucket = open_buckets.get(slot)
        if bucket is None:
            caps = caps_of(reduction.key.group_name)
            cap_bytes = caps.of_bucket(opened[reduction.key])
            opened[reduction.key] += 1
            bucket = open_buckets[slot] = _OpenBucket(caps, cap_bytes, ready_bytes)
        bucket.add(reduction, kernels, overwritten_at[reduction])
        ready_bytes += reduction.num_bytes
    closed += [_close(key, bucket, options) for (key, _), bucket in open_buckets.items()]
    return closed


def _close(key: ReductionKey, bucket: _OpenBucket, options: PlanOptions) -> Bucket:
    folds = not any(stores_unscaled(source_of(member).node) for member in bucket.members)
    scaling = choose_scaling(key, bucket.members, options.scaling, folds)
    return Bucket(key, tuple(bucket.members), bucket.cap_bytes, scaling)


def _in_reduce_dtype(
    reduction: GradientReduction, reduce_dtype: torch.dtype | None
) -> GradientReduction:
    key = reduction.key
    if (
        reduce_dtype is None
        or not key.dtype.is_floating_point
        or key.reduce_dtype != key.dtype
        or key.dtype.itemsize <= reduce_dtype.itemsize
    ):
        return reduction
    return replace(reduction, key=replace(key, reduce_dtype=reduce_dtype))


def _overwritten_at(
    graph: fx.Graph, reductions: Sequence[GradientReduction]
) -> dict[GradientReduction, float]:
    """Index of the first node behind a reduction's start that overwrites its gradient."""
    base_of, writes = write_positions(graph)
    found: dict[GradientReduction, float] = {}
    for reduction in reductions:
        positions = writes.get(base_of[reduction.gradient], [])
        following = bisect.bisect(positions, reduction.position)
        found[reduction] = positions[following] if following < len(positions) else math.inf
    return found
