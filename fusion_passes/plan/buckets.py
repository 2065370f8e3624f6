"""Buckets and plans: which gradient reductions are fused into one collective."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_passes.agreement.launches import Collective, LaunchList
from fusion_passes.config import ScalingOption
from fusion_passes.graph.collectives import group_name_of
from fusion_passes.graph.kernels import stores_unscaled
from fusion_passes.plan.again import ChosenFrom
from fusion_passes.plan.caps import BucketCaps
from fusion_passes.plan.placement import Placement, PlacementPlan
from fusion_passes.plan.scaling import BucketScaling, scaling_as_agreed
from fusion_passes.reductions.find import GradientReduction, ReductionKey, Rejection, dtype_name
from fusion_passes.reductions.producers import source_of


@dataclass(frozen=True)
class PredictedTimes:
    """When a bucket is sent by a profile's costs, in nanoseconds from the start of its graph.

    Attributes:
        start_ns: its last gradient is ready, and the network is free.
        end_ns: its collective is done.
    """

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Bucket:
    """Reductions that are fused into one collective.

    Attributes:
        key: what they have in common.
        members: in the order in which they become ready here, or on the ranks that have agreed.
        cap_bytes: the cap under which the bucket was filled; 0 if there was none.
        scaling: where its gradients are scaled.
        ready: the last reduction that must be ready before the bucket is launched: of a member, or
            of a bucket that is launched before.
        predicted: when it is sent; ``None`` where it was not chosen from measured costs. No part
            of the plan's digest.
    """

    key: ReductionKey
    members: tuple[GradientReduction, ...]
    cap_bytes: int
    scaling: BucketScaling
    ready: GradientReduction
    predicted: PredictedTimes | None = None

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
    """Buckets in the order in which they are launched, and what is left alone.

    Attributes:
        buckets: in the order in which they are launched.
        rejections: what is left alone, in graph order.
        placements: for each bucket, where it is launched and waited for; ``None`` for an empty
            one. Empty before the plan is carried out. No part of the digest: it follows from the
            graph, which may differ between ranks.
        decision: why these buckets were chosen, for people; empty where caps fill them.
        chosen_from: from what they were, where they are those of one module and were chosen from
            measured costs. No part of the digest.
    """

    buckets: tuple[Bucket, ...]
    rejections: tuple[Rejection, ...]
    placements: tuple[Placement | None, ...] = ()
    decision: tuple[str, ...] = ()
    chosen_from: ChosenFrom | None = None

    def with_placements(self, by_name: Mapping[str, Sequence[Placement]]) -> BucketPlan:
        """The plan, with where its fused buckets have been placed.

        Args:
            by_name: the placements on each group name, in the order of their launches.
        """
        waiting = {name: iter(placements) for name, placements in by_name.items()}
        placements = tuple(
            None if bucket.is_empty else next(waiting.get(bucket.key.group_name, iter(())), None)
            for bucket in self.buckets
        )
        return replace(self, placements=placements)

    def describe(self) -> str:
        """The plan for people: one line a bucket, one a rejection."""
        lines = [
            f"bucket {index}: {len(bucket.members)} gradients, {bucket.num_bytes} bytes, "
            f"cap {bucket.cap_bytes}, {bucket.key}, scaled: {bucket.scaling.method}: "
            + ", ".join(member.owner.parameter for member in bucket.members)
            for index, bucket in enumerate(self.buckets)
        ]
        lines += [f"left alone: {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def launch_lists(self, mode: str, placement: PlacementPlan) -> dict[str, LaunchList]:
        """What each DDP module is going to launch, by the name of its group.

        Args:
            mode: of the fusion.
            placement: of the graph with its final launches.
        """
        lists: dict[str, list[Collective]] = {}
        queues: Counter[str] = Counter()
        behind = {name: iter(counts) for name, counts in placement.behind.items()}
        for bucket in self.buckets:
            queue = bucket.members[0].owner.process_group
            # An empty one is as it was traced, on the name of its gradient.
            launch = bucket.members[0].start if bucket.is_empty else None
            name = bucket.key.group_name if launch is None else group_name_of(launch) or ""
            lists.setdefault(bucket.key.group_name, []).append(
                Collective(
                    bucket.scaling.divided,
                    dtype_name(bucket.key.reduce_dtype),
                    tuple(member.owner.number for member in bucket.members),
                    queues[queue],
                    next(behind.get(name, iter(())), 0),
                )
            )
            queues[queue] += 1
        later: dict[str, list[Collective]] = {}
        for rejection in self.rejections:
            if rejection.owner is not None:
                later.setdefault(rejection.owner.group_name, []).append(rejection.later())
        return {
            name: LaunchList(
                mode,
                tuple(lists.get(name, ())),
                tuple(later.get(name, ())),
                placement.foreign.get(name, 0),
            )
            for name in (lists | later)
        }

    def digest(self) -> str:
        """Equal for equal plans, in every process; 16 hexadecimal digits."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]


def buckets_as_agreed(
    reductions: Sequence[GradientReduction],
    agreed: LaunchList,
    caps: BucketCaps,
    overwritten_at: Mapping[GradientReduction, float],
    option: ScalingOption,
) -> list[Bucket]:
    """The buckets of a module's reductions, none of which depends on another, as the ranks have
    agreed on them; none where this graph cannot have them."""
    by_number = {reduction.owner.number: reduction for reduction in reductions}
    buckets: list[Bucket] = []
    if len(by_number) < len(reductions) or by_number.keys() != agreed.parameters:
        return []
    ready: GradientReduction | None = None
    for index, item in enumerate(agreed.collectives):
        members = tuple(by_number[number] for number in item.parameters)
        key = members[0].key
        ready = max((*members, ready or members[0]), key=lambda reduction: reduction.position)
        if (
            any(member.key != key for member in members)
            or dtype_name(key.reduce_dtype) != item.dtype
            or any(overwritten_at[member] < ready.position for member in members)
        ):
            return []
        scaling = scaling_as_agreed(key, item.divided, option, folds(members))
        buckets.append(Bucket(key, members, caps.of_bucket(index), scaling, ready))
    return buckets


def folds(members: Sequence[GradientReduction]) -> bool:
    """Whether each gradient is stored by a kernel that can scale it."""
    return not any(stores_unscaled(source_of(member).node) for member in members)
