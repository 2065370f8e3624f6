"""What the fusing passes share: a bucket's reductions are replaced by what a function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from fusion_passes.collectives import issue_order
from fusion_passes.dependencies import reorder
from fusion_passes.graph_edit import erase, record, replace_uses
from fusion_passes.planning import Bucket
from fusion_passes.reductions import ReductionKey, Scaling

ReduceBucket = Callable[[list[Tensor]], list[Tensor]]
"""Tensor code: the gradients of a bucket in, the reduced gradients out."""


def replace_buckets(
    graph: fx.Graph,
    buckets: Sequence[Bucket],
    foreign: Sequence[fx.Node],
    reduction_for: Callable[[ReductionKey], ReduceBucket],
) -> bool:
    """Puts a bucket's reduction where its last member was launched, and gives its results to the
    users of the members' waits. Users that stood earlier move behind the new wait; ``foreign``
    collectives keep their order all the same.

    Returns:
        Whether there was a bucket to fuse.
    """
    fused = [bucket for bucket in buckets if bucket.is_fused]
    replacements: dict[fx.Node, fx.Node] = {}
    for bucket in fused:
        members = bucket.members
        results, _ = record(
            members[-1].start, reduction_for(bucket.key), [m.gradient for m in members]
        )
        replacements |= zip((member.wait for member in members), results, strict=True)
    # A gradient can be the result of another bucket: written above as a member's wait.
    replace_uses(replacements)
    for bucket in fused:
        for member in bucket.members:
            scale = [member.scale] if member.scale is not None else []
            erase([*scale, member.start, member.wait])
    if fused:
        keys = {node: (index,) for index, node in enumerate(graph.nodes)}
        reorder(graph, keys, issue_order(foreign))
    return bool(fused)


def scale_by(scaling: Scaling, tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor divided or multiplied as ``scaling`` says: one operator for all of them."""
    if scaling.kind == "none":
        return tensors
    if len(tensors) == 1:
        operation = torch.div if scaling.kind == "div" else torch.mul
        return [operation(tensors[0], scaling.value)]
    foreach = torch._foreach_div if scaling.kind == "div" else torch._foreach_mul
    return list(foreach(tensors, scaling.value))
