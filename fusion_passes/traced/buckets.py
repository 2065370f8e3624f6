"""Puts the gradient reductions of a traced backward into the buckets of their modules' layouts.
Pure: reads the graph, changes nothing.

Other ranks may have traced another graph, or none: what they launch are the buckets of the same
layouts, in the same order. So a graph launches all of them, or is none that can be run.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusion_passes.config import ScalingOption
from fusion_passes.graph.collectives import group_name_of
from fusion_passes.graph.families import stores_unscaled
from fusion_passes.graph.text import dtype_name
from fusion_passes.reducer.scaling import sent_dtype
from fusion_passes.traced.dependencies import dependents, write_positions
from fusion_passes.traced.find import (
    FoundReductions,
    GradientReduction,
    ReductionKey,
    Rejection,
)
from fusion_passes.traced.placement import Placement
from fusion_passes.traced.producers import source_of
from fusion_passes.traced.scaling import BucketScaling, choose_scaling


class CannotLaunchError(Exception):
    """A graph cannot launch all that its modules launch. The text says why, and goes on "The
    backward ... because "."""


@dataclass(frozen=True)
class ModuleBuckets:
    """What a graph has to launch for a module.

    Attributes:
        numbers: of the parameters in each bucket of its layout, in the order in which buckets are
            launched, and gradients lie there.
        reduce_dtype: in which wider floating-point gradients are sent; ``None``: in their own.
        scaling: the option ``scaling``.
    """

    numbers: tuple[tuple[int, ...], ...]
    reduce_dtype: torch.dtype | None = None
    scaling: ScalingOption = "auto"


BucketsOf = Callable[[str], ModuleBuckets]
"""What a graph has to launch for the module that owns a group name."""


@dataclass(frozen=True)
class TracedBucket:
    """Reductions that are fused into one collective.

    Attributes:
        key: what they have in common.
        members: in the order in which they lie in it.
        reduce_dtype: in which they are sent.
        scaling: where its gradients are scaled.
        ready: the last reduction that must be ready before the bucket is launched: of a member, or
            of a bucket that is launched before.
    """

    key: ReductionKey
    members: tuple[GradientReduction, ...]
    reduce_dtype: torch.dtype
    scaling: BucketScaling
    ready: GradientReduction

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the collective reduces."""
        return self.num_bytes // self.key.dtype.itemsize * self.reduce_dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """What becomes of a graph's collectives.

    Attributes:
        buckets: in the order in which they are launched.
        rejections: what is left alone, in graph order.
        placements: where each bucket is launched and waited for. Empty before that is decided, or
            where it is switched off. No part of the digest: it follows from the graph, which may
            differ between ranks.
    """

    buckets: tuple[TracedBucket, ...]
    rejections: tuple[Rejection, ...]
    placements: tuple[Placement, ...] = ()

    def describe(self) -> str:
        """The plan for people: one line a bucket, one a rejection."""
        lines = [
            f"bucket {index}: {len(bucket.members)} gradients, {bucket.num_bytes} bytes, "
            f"{bucket.key}, sent as {dtype_name(bucket.reduce_dtype)}, scaled: "
            f"{bucket.scaling.method}: "
            + ", ".join(member.owner.parameter for member in bucket.members)
            for index, bucket in enumerate(self.buckets)
        ]
        lines += [f"left alone: {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def digest(self) -> str:
        """Equal for equal plans, in every process; 16 hexadecimal digits."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]


def plan_buckets(graph: fx.Graph, found: FoundReductions, buckets_of: BucketsOf) -> BucketPlan:
    """Put the reductions of a traced backward into the buckets that their modules launch.

    Raises:
        CannotLaunchError: the graph has not all of these reductions, or they cannot be launched in
            this order.
    """
    by_module: dict[str, list[GradientReduction]] = {}
    for reduction in found.reductions:
        by_module.setdefault(reduction.key.group_name, []).append(reduction)
    _check_others(found)
    averaged = dependents(graph, {reduction.wait for reduction in found.reductions})
    if any(reduction.start in averaged for reduction in found.reductions):
        raise CannotLaunchError("a gradient is computed from one that is averaged already")
    buckets: list[TracedBucket] = []
    for name, reductions in by_module.items():
        buckets += _of_module(reductions, buckets_of(name))
    _check_writes(graph, buckets)
    buckets.sort(key=lambda bucket: bucket.ready.position)
    return BucketPlan(tuple(buckets), found.rejections)


def _check_others(found: FoundReductions) -> None:
    """Refuse what could not be launched in the order in which other ranks may launch it."""
    groups = {reduction.owner.process_group for reduction in found.reductions}
    for item in found.rejections:
        if item.owner is not None:
            raise CannotLaunchError(
                f"the gradient of {item.owner.parameter} cannot be fused: {item}"
            )
        if group_name_of(item.node) in groups:
            raise CannotLaunchError(f"it has a collective of the model's on the same ranks: {item}")


def _of_module(reductions: Sequence[GradientReduction], of: ModuleBuckets) -> list[TracedBucket]:
    owner = reductions[0].owner
    by_number = {reduction.owner.number: reduction for reduction in reductions}
    numbers = {number for bucket in of.numbers for number in bucket}
    if len(by_number) < len(reductions) or by_number.keys() != numbers:
        raise CannotLaunchError(
            f"a graph of it has {len(reductions)} of the {len(numbers)} gradients of {owner.module}"
        )
    buckets: list[TracedBucket] = []
    ready: GradientReduction | None = None
    for bucket in of.numbers:
        members = tuple(by_number[number] for number in bucket)
        key = members[0].key
        # Buckets are launched in their order, so that one may have to wait for another.
        ready = max((*members, ready or members[0]), key=lambda reduction: reduction.position)
        if not any(member.num_bytes for member in members):
            raise CannotLaunchError(f"a bucket of {owner.module} has no elements")
        if any(member.key != key for member in members):
            raise CannotLaunchError(f"gradients of a bucket of {owner.module} are of several kinds")
        folds = not any(stores_unscaled(source_of(member).node) for member in members)
        sent_as = sent_dtype(key.dtype, of.reduce_dtype)
        scaling = choose_scaling(key, owner, reduce_dtype=sent_as, scaling=of.scaling, folds=folds)
        buckets.append(TracedBucket(key, members, sent_as, scaling, ready))
    return buckets


def _check_writes(graph: fx.Graph, buckets: Sequence[TracedBucket]) -> None:
    """Refuse gradients whose memory has something else in it when their bucket is launched."""
    base_of, writes = write_positions(graph.nodes)
    for bucket in buckets:
        for member in bucket.members:
            at = writes.get(base_of[member.gradient], [])
            if bisect.bisect(at, member.position) < bisect.bisect_left(at, bucket.ready.position):
                raise CannotLaunchError(
                    f"the gradient of {member.owner.parameter} is overwritten before it is sent"
                )
