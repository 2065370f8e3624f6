"""Decides which gradient reductions share a bucket. Pure: reads the graph, changes nothing.

The same graph and caps give the same plan on every rank: what decides is the order of the graph,
dtypes, sizes and group names, never rank, time, hash order or a measurement made here. Graphs may
differ between ranks, where batches or branches do. So where the ranks have agreed on how to reduce
the gradients of a graph (:mod:`fusion_passes.agreement.protocol`), that is the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import torch
from torch import fx

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.config import ScalingOption
from fusion_passes.graph.collectives import issue_order
from fusion_passes.graph.dependencies import reduction_levels
from fusion_passes.graph.kernels import is_library_kernel
from fusion_passes.plan.again import ChosenFrom
from fusion_passes.plan.buckets import Bucket, BucketPlan, buckets_as_agreed, folds
from fusion_passes.plan.caps import ALONG_SHARE, BucketCaps
from fusion_passes.plan.corrected import StepsOf, by_steps, no_steps
from fusion_passes.plan.measured import Given, choose_members
from fusion_passes.plan.overwritten import overwritten_positions
from fusion_passes.plan.ready import ready_times
from fusion_passes.plan.scaling import choose_scaling
from fusion_passes.profile.records import Profile
from fusion_passes.reductions.find import GradientReduction, ReductionKey, Rejection

ProfileOf = Callable[[str], Profile | None]
"""What collectives cost for the DDP module that owns a group name; ``None`` if nobody knows."""


def no_profile(_: str) -> Profile | None:
    """As :data:`ProfileOf`, where nothing was measured."""
    return None


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks of all buckets.

    Attributes:
        scaling: where gradients are scaled.
        reduce_dtype: in which wider floating-point gradients are sent; ``None``: in their own.
            What a communication hook has cast already is sent as it is.
        profile_of: what collectives of the DDP module cost that owns a group name: buckets are
            chosen from that. ``None``: they are filled up to their caps.
        steps_of: when its gradients were ready in steps that were measured.
    """

    scaling: ScalingOption = "auto"
    reduce_dtype: torch.dtype | None = None
    profile_of: ProfileOf | None = None
    steps_of: StepsOf = no_steps


DEFAULT_OPTIONS: Final = PlanOptions()

NO_CAP: Final = 0
"""The cap of a bucket that has none."""

NO_PROFILE: Final = (
    "filled up to caps, because there is no profile: the DDP module has a group of one rank, or "
    "was constructed before ddp_fusion = 'auto', or was moved to another process group"
)
"""Why buckets were not chosen from measurement."""

AS_AGREED: Final = "these buckets are those on which the ranks have agreed for another graph"
"""Why buckets are what they are where another graph reduces the same gradients."""

CapsOf = Callable[[str], BucketCaps]
"""The caps of the DDP module that owns a group name."""

AgreedOf = Callable[[str, Collection[int]], LaunchList | None]
"""How the ranks have agreed to reduce some parameters' gradients, by the group name of their DDP
module and the parameters' numbers; ``None`` where they have not."""


def nothing_agreed(_: str, __: Collection[int]) -> LaunchList | None:
    """As :data:`AgreedOf`, for ranks that have not met."""
    return None


@dataclass
class _OpenBucket:
    caps: BucketCaps
    cap_bytes: int
    opened_at: int
    members: list[GradientReduction] = field(default_factory=list)
    num_bytes: int = 0
    overwritten_at: float = math.inf
    filled_by: int | None = None
    """How many library kernels are before the reduction that brought the bucket to its cap."""
    along_bytes: int = 0

    def must_close(self, ready_bytes: int, position: int, kernels: int) -> bool:
        """Whether the bucket must be launched before a reduction at ``position``, which has
        ``kernels`` library kernels before it."""
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
    agreed_of: AgreedOf = nothing_agreed,
) -> BucketPlan:
    """Fill buckets in the order in which the reductions become ready.

    Reductions share a bucket if their keys are equal and so are their levels, neighbours in the
    graph or not. The level of a reduction is the number of buckets that must be reduced, one
    after the other, before its gradient exists (0 for nearly all), so no bucket can come to wait
    for itself. A bucket is closed before anything overwrites a gradient that it holds. A full one
    takes along small gradients that are ready before the next library kernel runs: the bias beside
    its weight, which would begin the next bucket, or be one of its own after the last.

    Args:
        graph: the graph that holds the reductions.
        reductions: in graph order.
        caps_of: the caps for a key's group name.
        rejections: the collectives that are left alone, in graph order. They keep their order,
            which can make a gradient depend on a reduction that it does not read.
        options: what the user asks of all buckets.
        agreed_of: what the ranks have agreed on.
    """
    reductions = [_in_reduce_dtype(reduction, options.reduce_dtype) for reduction in reductions]
    overwritten_at = overwritten_positions(graph, reductions)
    levels = reduction_levels(
        graph,
        {reduction.wait: reduction.start for reduction in reductions},
        issue_order(rejection.node for rejection in rejections),
    )
    kernels_before = [*accumulate((is_library_kernel(node) for node in graph.nodes), initial=0)]
    closed: list[Bucket] = []
    for name, mine in _by_module(reductions).items():
        agreed = agreed_of(name, [reduction.owner.number for reduction in mine])
        if agreed is not None and not any(levels[reduction.start] for reduction in mine):
            caps = caps_of(name)
            if options.profile_of is not None:
                caps = BucketCaps(caps.most_bytes or NO_CAP, caps.most_bytes or NO_CAP, 0)
            closed += buckets_as_agreed(mine, agreed, caps, overwritten_at, options.scaling)
    done = {reduction for bucket in closed for reduction in bucket.members}
    rest = [reduction for reduction in reductions if reduction not in done]
    filled = _fill(rest, levels, overwritten_at, kernels_before, caps_of, options)
    said: tuple[str, ...] = (AS_AGREED,) if done else ()
    chosen_from = None
    if options.profile_of is None:
        said = ()
    elif rest:
        filled, decision, chosen_from = _choose(
            graph, rest, levels, overwritten_at, caps_of, options, filled
        )
        said = (*decision, *said)
    closed = sorted([*closed, *filled], key=lambda bucket: bucket.ready.position)
    chosen_from = None if done else chosen_from
    return BucketPlan(tuple(closed), tuple(rejections), decision=said, chosen_from=chosen_from)


def _choose(
    graph: fx.Graph,
    reductions: Sequence[GradientReduction],
    levels: Mapping[fx.Node, int],
    overwritten_at: Mapping[GradientReduction, float],
    caps_of: CapsOf,
    options: PlanOptions,
    filled: list[Bucket],
) -> tuple[list[Bucket], tuple[str, ...], ChosenFrom | None]:
    """Buckets that are chosen from measurement, ``filled`` where there is none; why; and from what,
    if they are of one module."""
    assert options.profile_of is not None, "else there is nothing to choose from"
    names = dict.fromkeys(reduction.key.group_name for reduction in reductions)
    profiles = {name: options.profile_of(name) for name in names}
    known = [profile for profile in profiles.values() if profile is not None]
    if len(known) < len(profiles):
        return filled, (NO_PROFILE,), None
    estimates = ready_times(graph, known[0].rates, {node for r in reductions for node in r.nodes})
    ready_ns, steps = by_steps(reductions, estimates, options.steps_of)
    given = Given(
        reductions,
        levels,
        ready_ns,
        overwritten_at,
        caps_of,
        dict(zip(profiles, known, strict=True)),
        options.scaling,
        steps,
    )
    chosen, decision = choose_members(given, [bucket.members for bucket in filled])
    buckets = [
        replace(_bucket(mine, caps_of(mine[0].key.group_name), options), predicted=predicted)
        for mine, predicted in chosen
    ]
    is_one = len(names) == 1
    return buckets, decision.lines(), given.chosen_from(estimates) if is_one else None


def _bucket(
    members: tuple[GradientReduction, ...], caps: BucketCaps, options: PlanOptions
) -> Bucket:
    """A bucket that was chosen from measurement."""
    key = members[0].key
    scaling = choose_scaling(key, members[0].owner, options.scaling, folds(members))
    return Bucket(key, members, caps.most_bytes or NO_CAP, scaling, members[-1])


def _by_module(reductions: Sequence[GradientReduction]) -> dict[str, list[GradientReduction]]:
    modules: dict[str, list[GradientReduction]] = {}
    for reduction in reductions:
        modules.setdefault(reduction.key.group_name, []).append(reduction)
    return modules


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
    members = tuple(bucket.members)
    scaling = choose_scaling(key, members[0].owner, options.scaling, folds(members))
    return Bucket(key, members, bucket.cap_bytes, scaling, members[-1])


def _in_reduce_dtype(
    reduction: GradientReduction, reduce_dtype: torch.dtype | None
) -> GradientReduction:
    key = reduction.key
    if (
        reduce_dtype is None
        or key.calls_hook
        or not key.dtype.is_floating_point
        or key.reduce_dtype != key.dtype
        or key.dtype.itemsize <= reduce_dtype.itemsize
    ):
        return reduction
    return replace(reduction, key=replace(key, reduce_dtype=reduce_dtype))
