"""Replaces the reductions of a bucket by what tensor code does: the fusing passes share this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import issue_order
from fusion_passes.graph.edits import erase, record, replace_uses
from fusion_passes.graph.families import CAST
from fusion_passes.traced.buckets import TracedBucket
from fusion_passes.traced.dependencies import reorder
from fusion_passes.traced.find import GradientReduction

Replacement: TypeAlias = tuple[Sequence[fx.Node], Callable[[list[Tensor]], list[Tensor]]]
"""What takes the place of a bucket's reductions: a node for each member (its gradient, or a node
that the gradient is a view or cast of), and tensor code that takes the values of these nodes and
returns the reduced gradients."""


def replace_buckets(
    graph: fx.Graph,
    buckets: Sequence[TracedBucket],
    replacement_for: Callable[[int, TracedBucket], Replacement],
) -> bool:
    """Put the reduction of each bucket of a plan before the launch of its ``ready`` reduction, and
    give its results to the users of the members' waits. Users that stood before the new wait move
    after it; the collectives of one group keep their order all the same.

    Returns:
        Whether there was a bucket to fuse.
    """
    replacements: dict[fx.Node, fx.Node] = {}
    for index, bucket in enumerate(buckets):
        inputs, function = replacement_for(index, bucket)
        results = record(bucket.ready.start, function, inputs)
        replacements |= zip((member.wait for member in bucket.members), results, strict=True)
    replace_uses(replacements)
    for bucket in buckets:
        for member in bucket.members:
            _erase_reduction(member)
    if buckets:
        keys = {node: (index,) for index, node in enumerate(graph.nodes)}
        reorder(graph, keys, issue_order(graph.nodes))
    return bool(buckets)


def _erase_reduction(member: GradientReduction) -> None:
    erase(member.nodes)
    node = member.gradient
    while not node.users and len(node.all_input_nodes) == 1:
        # A view or cast that the new nodes do not read: they read its input.
        source = node.all_input_nodes[0]
        erase([node])
        node = source


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in ``dtype``; the tensor itself if it already has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    result: Tensor = CAST(tensor, dtype)
    return result
