"""Buckets and plans: which gradient reductions are fused into one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_passes.graph.kernels import stores_unscaled
from fusion_passes.plan.placement import Placement
from fusion_passes.plan.scaling import BucketScaling
from fusion_passes.reductions.find import GradientReduction, ReductionKey, Rejection
from fusion_passes.reductions.producers import source_of


@dataclass(frozen=True)
class Bucket:
    """Reductions that are fused into one collective.

    Attributes:
        key: what they have in common.
        members: in the order in which they lie in it.
        scaling: where its gradients are scaled.
        ready: the last reduction that must be ready before the bucket is launched: of a member, or
            of a bucket that is launched before.
    """

    key: ReductionKey
    members: tuple[GradientReduction, ...]
    scaling: BucketScaling
    ready: GradientReduction

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the collective reduces."""
        return self.num_bytes // self.key.dtype.itemsize * self.key.reduce_dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are launched, and what is left alone.

    Attributes:
        buckets: in the order in which they are launched.
        rejections: what is left alone, in graph order.
        placements: for each bucket, where it is launched and waited for. Empty before the plan is
            carried out. No part of the digest: it follows from the graph, which may differ between
            ranks.
    """

    buckets: tuple[Bucket, ...]
    rejections: tuple[Rejection, ...]
    placements: tuple[Placement | None, ...] = ()

    def with_placements(self, by_name: Mapping[str, Sequence[Placement]]) -> BucketPlan:
        """The plan, with where its fused buckets have been placed.

        Args:
            by_name: the placements on each group name, in the order of their launches.
        """
        waiting = {name: iter(placements) for name, placements in by_name.items()}
        placements = tuple(
            next(waiting.get(bucket.key.group_name, iter(())), None) for bucket in self.buckets
        )
        return replace(self, placements=placements)

    def describe(self) -> str:
        """The plan for people: one line a bucket, one a rejection."""
        lines = [
            f"bucket {index}: {len(bucket.members)} gradients, {bucket.num_bytes} bytes, "
            f"{bucket.key}, scaled: {bucket.scaling.method}: "
            + ", ".join(member.owner.parameter for member in bucket.members)
            for index, bucket in enumerate(self.buckets)
        ]
        lines += [f"left alone: {rejection}" for rejection in self.rejections]
        return "\n".join(lines)

    def digest(self) -> str:
        """Equal for equal plans, in every process; 16 hexadecimal digits."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]


def folds(members: Sequence[GradientReduction]) -> bool:
    """Whether each gradient is stored by a kernel that can scale it."""
    return not any(stores_unscaled(source_of(member).node) for member in members)
