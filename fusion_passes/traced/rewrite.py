"""Replaces the reductions of a bucket by what tensor code does: the base of the fusing passes."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import issue_order
from fusion_passes.graph.edits import erase, record, replace_uses
from fusion_passes.graph.families import CAST
from fusion_passes.traced.buckets import TracedBucket
from fusion_passes.traced.dependencies import reorder
from fusion_passes.traced.find import GradientReduction
from fusion_passes.traced.verify import GraphFacts, GraphPass

Replacement: TypeAlias = tuple[Sequence[fx.Node], Callable[[list[Tensor]], list[Tensor]]]
"""What takes the place of a bucket's reductions: a node for each member (its gradient, or the node
that the gradient is a cast of), and tensor code that takes the values of these nodes and
returns the reduced gradients."""


@dataclass(frozen=True)
class FuseBuckets(GraphPass):
    """Puts the reduction of each bucket of a plan before the launch of its ``ready`` reduction, and
    gives its results to the users of the members' waits. Users that stood before the new wait move
    after it; the collectives of one group keep their order all the same.

    Attributes:
        buckets: buckets to fuse, from :func:`fusion_passes.traced.buckets.plan_buckets` for the
            graph that the pass is called with.
    """

    buckets: tuple[TracedBucket, ...]

    @abstractmethod
    def replacement_for(self, index: int, bucket: TracedBucket) -> Replacement:
        """What takes the place of the reductions of a bucket."""

    def __call__(self, graph: fx.Graph) -> bool:
        replacements: dict[fx.Node, fx.Node] = {}
        for index, bucket in enumerate(self.buckets):
            inputs, function = self.replacement_for(index, bucket)
            results = record(bucket.ready.start, function, inputs)
            replacements |= zip((member.wait for member in bucket.members), results, strict=True)
        replace_uses(replacements)
        for bucket in self.buckets:
            for member in bucket.members:
                _erase_reduction(member)
        if self.buckets:
            keys = {node: (index,) for index, node in enumerate(graph.nodes)}
            reorder(graph, keys, issue_order(graph.nodes))
        return bool(self.buckets)

    def facts_after(self, before: GraphFacts) -> GraphFacts:
        """Each bucket is reduced with the reduce op and in the dtype of the plan, and nothing else
        changes."""
        reduced = Counter(before.reduced)
        for bucket in self.buckets:
            group = bucket.key.group_name
            for member in bucket.members:
                count = member.start.meta["val"].numel()
                reduced[group, "sum", bucket.key.dtype] -= count
                reduced[group, bucket.scaling.reduce_op, bucket.reduce_dtype] += count
        return replace(before, reduced=+reduced)


def _erase_reduction(member: GradientReduction) -> None:
    erase(member.nodes)
    if not member.gradient.users:  # A cast that the new nodes do not read: they read its input.
        erase([member.gradient])


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in ``dtype``; the tensor itself if it already has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    result: Tensor = CAST(tensor, dtype)
    return result
