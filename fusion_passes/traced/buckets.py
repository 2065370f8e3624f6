"""Groups the gradient reductions of a traced backward into the buckets of their modules' layouts,
and decides where each bucket is scaled. Pure: reads the graph, changes nothing.

Other ranks may have traced another graph, or none. They launch the buckets of the same layouts, in
the same order. A graph therefore launches all of these buckets, or it cannot be run.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import fx

from fusion_passes.graph.collectives import group_name_of
from fusion_passes.graph.families import VIEWS, stores_unscaled
from fusion_passes.graph.text import dtype_name
from fusion_passes.layout.layout import Piece
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.traced.dependencies import dependents, write_positions
from fusion_passes.traced.find import (
    FoundReductions,
    GradientReduction,
    ReductionKey,
    Rejection,
)
from fusion_passes.traced.place import Placement

ScalingMethod: TypeAlias = Literal["none", "collective", "store", "bucket", "result"]
"""Where the gradients of a bucket are scaled.

* ``"none"``: nowhere, since there is nothing to scale by.
* ``"collective"``: in the collective, which averages.
* ``"store"``: in the kernels that store the gradients in the bucket.
* ``"bucket"``: in one pass over the bucket, before the launch.
* ``"result"``: in the kernel that casts the result back, after the wait.
"""


@dataclass(frozen=True)
class BucketScaling:
    """Where a bucket is scaled, and by what.

    Attributes:
        method: see :data:`ScalingMethod`.
        reduce_op: reduce op of the collective: ``"sum"`` or ``"avg"``.
        before: number that gradients are divided by before the launch: as stored, or in the bucket.
        after: number that results are divided by after the wait.
    """

    method: ScalingMethod
    reduce_op: str
    before: float = 1.0
    after: float = 1.0


class CannotLaunchError(Exception):
    """A graph cannot launch all that its modules launch. The text is the reason, which completes
    "The backward ... because "."""


@dataclass(frozen=True)
class ModuleBuckets:
    """The buckets that a graph has to launch for a module.

    Attributes:
        numbers: parameter numbers of each bucket of the module's layout: buckets in launch order,
            and parameters in the order in which their gradients lie in the bucket.
        communication: how reducers send these buckets, on this rank and on others.
    """

    numbers: tuple[Piece, ...]
    communication: AllReduce


BucketsOf = Callable[[str], ModuleBuckets]
"""Returns what a graph has to launch for the module that owns a group name."""


@dataclass(frozen=True)
class TracedBucket:
    """Reductions that are fused into one collective.

    Attributes:
        key: what the reductions have in common.
        members: reductions, in the order in which their gradients lie in the bucket.
        reduce_dtype: dtype in which the gradients are sent.
        scaling: where and by what the gradients are scaled.
        ready: the latest reduction that this bucket's launch depends on: a member, or a member of a
            bucket of the module that is launched earlier.
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
    """The plan for a graph's collectives: those to fuse, in which buckets, and those to leave.

    Attributes:
        buckets: buckets, in launch order.
        rejections: collectives that are left alone, in graph order.
        placements: where each bucket is launched and waited for. Empty until that is decided, or if
            the pass is switched off. Not part of the digest: placements follow from the graph,
            which may differ between ranks.
    """

    buckets: tuple[TracedBucket, ...]
    rejections: tuple[Rejection, ...]
    placements: tuple[Placement, ...] = ()

    def describe(self) -> str:
        """The plan for people: one line per bucket, one line per rejection."""
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
        """A hash that is equal for equal plans, in every process; 16 hexadecimal digits."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]


def plan_buckets(graph: fx.Graph, found: FoundReductions, buckets_of: BucketsOf) -> BucketPlan:
    """Group the reductions of a traced backward into the buckets that their modules launch.

    Raises:
        CannotLaunchError: the graph lacks some of these reductions, or cannot launch them in this
            order.
    """
    by_module: dict[str, list[GradientReduction]] = {}
    for reduction in found.reductions:
        by_module.setdefault(reduction.key.group_name, []).append(reduction)
    _check_others(found)
    averaged = dependents(graph, {reduction.wait for reduction in found.reductions})
    if any(reduction.start in averaged for reduction in found.reductions):
        raise CannotLaunchError("a gradient depends on another gradient that is already averaged")
    buckets: list[TracedBucket] = []
    for name, reductions in by_module.items():
        buckets += _of_module(reductions, buckets_of(name))
    _check_writes(graph, buckets)
    buckets.sort(key=lambda bucket: bucket.ready.position)
    return BucketPlan(tuple(buckets), found.rejections)


def _check_others(found: FoundReductions) -> None:
    """Refuse a graph in which a gradient cannot be fused, or another collective runs on the same
    process group: other ranks may launch their collectives in another order."""
    groups = {reduction.owner.process_group for reduction in found.reductions}
    for item in found.rejections:
        if item.owner is not None:
            raise CannotLaunchError(
                f"the gradient of {item.owner.parameter} cannot be fused: {item}"
            )
        if group_name_of(item.node) in groups:
            raise CannotLaunchError(
                f"the model has a collective of its own on the same process group: {item}"
            )


def _of_module(reductions: Sequence[GradientReduction], of: ModuleBuckets) -> list[TracedBucket]:
    owner = reductions[0].owner
    by_number = {reduction.owner.number: reduction for reduction in reductions}
    numbers = {number for bucket in of.numbers for number in bucket}
    if len(by_number) < len(reductions) or by_number.keys() != numbers:
        raise CannotLaunchError(
            f"its graph has {len(reductions)} of the {len(numbers)} gradients of {owner.module}"
        )
    buckets: list[TracedBucket] = []
    ready: GradientReduction | None = None
    for bucket in of.numbers:
        members = tuple(by_number[number] for number in bucket)
        key = members[0].key
        # Buckets are launched in order, so a bucket may have to wait for an earlier one.
        ready = max((*members, ready or members[0]), key=lambda reduction: reduction.position)
        if not any(member.num_bytes for member in members):
            raise CannotLaunchError(f"all gradients in a bucket of {owner.module} are empty")
        if any(member.key != key for member in members):
            raise CannotLaunchError(
                f"gradients in a bucket of {owner.module} differ in dtype, device or divisor"
            )
        folds = not any(stores_unscaled(_behind_views(member.gradient)) for member in members)
        sent_as = of.communication.sent_dtype(key.dtype)
        scaling = choose_scaling(key, of.communication, folds=folds)
        buckets.append(TracedBucket(key, members, sent_as, scaling, ready))
    return buckets


def _behind_views(gradient: fx.Node) -> fx.Node:
    """The node whose kernel computes a gradient: the gradient may be a view of its result."""
    while gradient.target in VIEWS:
        gradient = gradient.all_input_nodes[0]
    return gradient


def _check_writes(graph: fx.Graph, buckets: Sequence[TracedBucket]) -> None:
    """Refuse a graph that overwrites a gradient's memory before the gradient's bucket is
    launched."""
    base_of, writes = write_positions(graph.nodes)
    for bucket in buckets:
        for member in bucket.members:
            at = writes.get(base_of[member.gradient], [])
            if bisect.bisect(at, member.position) < bisect.bisect_left(at, bucket.ready.position):
                raise CannotLaunchError(
                    f"the graph overwrites the gradient of {member.owner.parameter} before the "
                    "launch of its bucket"
                )


def choose_scaling(key: ReductionKey, communication: AllReduce, *, folds: bool) -> BucketScaling:
    """Where a bucket with this ``key`` is scaled: where a reducer scales it, because other ranks
    rely on that. With ``folds``, each gradient is stored by a kernel that can scale it."""
    if key.divisor == 1:
        return BucketScaling("none", "sum")
    where = communication.scaling(key.dtype)
    if where == "collective" and key.divisor == communication.divisor():
        return BucketScaling("collective", "avg")
    if where == "result":
        return BucketScaling("result", "sum", after=float(key.divisor))
    is_cast = communication.sent_dtype(key.dtype) != key.dtype  # By a kernel that can scale, too.
    return BucketScaling("store" if folds or is_cast else "bucket", "sum", float(key.divisor))
