"""Fuses the reductions of a bucket: all of its gradients are stored in one flat buffer."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.graph.custom_ops import PACK, WIDEN
from fusion_passes.graph.families import CASTS
from fusion_passes.traced.buckets import TracedBucket
from fusion_passes.traced.find import GradientReduction
from fusion_passes.traced.rewrite import FuseBuckets, Replacement


@dataclass(frozen=True)
class FuseByConcat(FuseBuckets):
    """Makes one flat buffer and one all-reduce of each bucket.

    Before, for two gradients::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0
        g1: f32[8]    -> div(2) -> all_reduce(sum) -> wait -> user1

    After::

        bucket: f32[40] = pack([g0, g1], offsets [0, 32], divided by 2)
        bucket -> all_reduce(sum) -> wait -> as_strided [4, 8] at 0  -> user0
                                          -> as_strided [8]    at 32 -> user1

    ``pack`` is no kernel: the kernels that produce the gradients store them in the bucket (see
    :mod:`fusion_passes.traced.pack`), and the reduced gradients stay views of it. The plan decides
    where the bucket is scaled. If the bucket is sent in a smaller dtype, ``pack`` also casts, and
    ``widen`` casts back after the wait.

    Each result has the shape and dtype of the reduction that it replaces, and the strides of the
    parameter, in which compiled autograd accumulates.

    Attributes:
        label: name of the plan, for the report of what was copied.
    """

    label: str = "plan"

    def replacement_for(self, index: int, bucket: TracedBucket) -> Replacement:
        is_cast = bucket.reduce_dtype != bucket.key.dtype and bucket.scaling.method != "store"
        sent_as = bucket.reduce_dtype if is_cast else None
        stored = [_before_cast(member, sent_as) for member in bucket.members]
        return stored, functools.partial(_reduce, bucket, f"{self.label}:{index}")


def _before_cast(member: GradientReduction, sent_as: torch.dtype | None) -> fx.Node:
    """The node that a bucket in the dtype ``sent_as`` stores: the gradient, or the node that it is
    cast from, if that has the dtype already and only the cast and the reduction read the two."""
    node = member.gradient
    if node.target not in CASTS or any(user not in member.nodes for user in node.users):
        return node
    (source,) = node.all_input_nodes
    is_sent_so = source.meta["val"].dtype == sent_as and len(source.users) == 1
    return source if is_sent_so else node


def _reduce(bucket: TracedBucket, label: str, gradients: list[Tensor]) -> list[Tensor]:
    """Pack and reduce a bucket; return the averaged gradients, as views of one buffer."""
    key, scaling = bucket.key, bucket.scaling
    # In the order of the layout and without gaps, as the reducers of other ranks have them.
    offsets = list(itertools.accumulate((each.numel() for each in gradients[:-1]), initial=0))
    filled = [index for index, each in enumerate(gradients) if each.numel()]
    reduced = PACK(
        [gradients[index] for index in filled],
        [offsets[index] for index in filled],
        [stride for index in filled for stride in bucket.members[index].strides],
        bucket.reduce_dtype,
        scaling.before,
        scaling.method == "bucket",
        label,
    )
    reduced = all_reduce(reduced, scaling.reduce_op, key.group_name)
    if bucket.reduce_dtype != key.dtype:
        reduced = WIDEN(reduced, key.dtype, scaling.after)
    return [
        reduced.as_strided(member.wait.meta["val"].shape, member.strides, offset)
        if member.num_bytes
        # An empty view of the buffer would come back with other strides.
        else gradient.clone(memory_format=torch.contiguous_format)
        for member, offset, gradient in zip(bucket.members, offsets, gradients, strict=True)
    ]
