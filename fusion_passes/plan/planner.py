"""Puts the gradient reductions of a traced backward into the buckets of their modules' layouts.
Pure: reads the graph, changes nothing.

Other ranks may have traced another graph, or none: what they launch are the buckets of the same
layouts, in the same order. So a graph launches all of them, or is none that can be run.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fusion_passes.graph.collectives import group_name_of
from fusion_passes.graph.dependencies import reduction_levels, write_positions
from fusion_passes.plan.buckets import Bucket, BucketPlan, folds
from fusion_passes.plan.scaling import choose_scaling
from fusion_passes.reductions.find import FoundReductions, GradientReduction


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
        divides_first: whether gradients are divided before they are summed, on any backend.
    """

    numbers: tuple[tuple[int, ...], ...]
    reduce_dtype: torch.dtype | None = None
    divides_first: bool = False


BucketsOf = Callable[[str], ModuleBuckets]
"""What a graph has to launch for the module that owns a group name."""


def plan_buckets(graph: fx.Graph, found: FoundReductions, buckets_of: BucketsOf) -> BucketPlan:
    """Put reductions into buckets.

    Args:
        graph: a traced backward.
        found: its reductions.
        buckets_of: what their modules launch.

    Raises:
        CannotLaunchError: the graph has not all of these reductions, or they cannot be launched in
            this order.
    """
    by_module: dict[str, list[GradientReduction]] = {}
    for reduction in found.reductions:
        by_module.setdefault(reduction.key.group_name, []).append(reduction)
    _check_others(found)
    levels = reduction_levels(graph, {r.wait: r.start for r in found.reductions}, ())
    if any(levels[reduction.start] for reduction in found.reductions):
        raise CannotLaunchError("a gradient is computed from one that is averaged already")
    overwritten_at = _overwritten_positions(graph, found.reductions)
    buckets: list[Bucket] = []
    for name, reductions in by_module.items():
        buckets += _of_module(reductions, buckets_of(name), overwritten_at)
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


def _of_module(
    reductions: Sequence[GradientReduction],
    of: ModuleBuckets,
    overwritten_at: Mapping[fx.Node, float],
) -> list[Bucket]:
    owner = reductions[0].owner
    by_number = {
        reduction.owner.number: _in_reduce_dtype(reduction, of.reduce_dtype)
        for reduction in reductions
    }
    numbers = {number for bucket in of.numbers for number in bucket}
    if len(by_number) < len(reductions) or by_number.keys() != numbers:
        raise CannotLaunchError(
            f"a graph of it has {len(reductions)} of the {len(numbers)} gradients of {owner.module}"
        )
    buckets: list[Bucket] = []
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
        scaling = choose_scaling(key, owner, divides_first=of.divides_first, folds=folds(members))
        buckets.append(Bucket(key, members, scaling, ready))
    for item in buckets:
        for member in item.members:
            if overwritten_at[member.start] < item.ready.position:
                raise CannotLaunchError(
                    f"the gradient of {member.owner.parameter} is overwritten before it is sent"
                )
    return buckets


def _overwritten_positions(
    graph: fx.Graph, reductions: Sequence[GradientReduction]
) -> dict[fx.Node, float]:
    """Index of the first node after a reduction's start that overwrites its gradient, by start."""
    base_of, writes = write_positions(graph)
    found: dict[fx.Node, float] = {}
    for reduction in reductions:
        positions = writes.get(base_of[reduction.gradient], [])
        following = bisect.bisect(positions, reduction.position)
        found[reduction.start] = positions[following] if following < len(positions) else math.inf
    return found


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
