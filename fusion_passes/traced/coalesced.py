"""Fuses the reductions of a bucket into one collective over a list of tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_passes.graph.collectives import all_reduce_coalesced
from fusion_passes.graph.custom_ops import divided
from fusion_passes.traced.buckets import TracedBucket
from fusion_passes.traced.find import GradientReduction
from fusion_passes.traced.rewrite import FuseBuckets, Replacement, cast


@dataclass(frozen=True)
class FuseByCoalescing(FuseBuckets):
    """Makes one ``all_reduce_coalesced`` of each bucket, without a buffer of the package's own.

    Before, for two gradients::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0
        g1: f32[8]    -> div(2) -> all_reduce(sum) -> wait -> user1

    After::

        s0, s1 = _foreach_div([g0, g1], 2)
        r0, r1 = all_reduce_coalesced([s0, s1], sum)
        r0: f32[4, 8] -> wait -> user0
        r1: f32[8]    -> wait -> user1

    If the plan lets the collective average, only the collective is left. Gradients are sent as they
    lie in memory, whatever the order of their dimensions. If gradients are sent in a smaller dtype,
    each one is cast before the launch and cast back after its wait.

    Each result has the shape and dtype of the reduction that it replaces, and the strides of the
    parameter, in which compiled autograd accumulates.
    """

    def replacement_for(self, _: int, bucket: TracedBucket) -> Replacement:
        return [member.gradient for member in bucket.members], functools.partial(_reduce, bucket)


def _reduce(bucket: TracedBucket, gradients: list[Tensor]) -> list[Tensor]:
    """Reduce a bucket; return the averaged gradients, each in a tensor of its own."""
    key, scaling = bucket.key, bucket.scaling
    flat = [_as_it_lies(g, m.strides) for m, g in zip(bucket.members, gradients, strict=True)]
    to_sum = _divided(flat, scaling.before)
    sent = [cast(tensor, bucket.reduce_dtype) for tensor in to_sum]
    reduced = all_reduce_coalesced(sent, scaling.reduce_op, key.group_name)
    wide = [cast(tensor, key.dtype) for tensor in reduced]
    results = _divided(wide, scaling.after)
    return [_in_place(m, result) for m, result in zip(bucket.members, results, strict=True)]


def _divided(tensors: Sequence[Tensor], divisor: float) -> list[Tensor]:
    """Divide each tensor by a number, all of them with one operator."""
    if divisor == 1 or len(tensors) == 1:
        return [divided(tensor, divisor) for tensor in tensors]
    return list(torch._foreach_div(list(tensors), divisor))


def _in_place(member: GradientReduction, reduced: Tensor) -> Tensor:
    shape = member.wait.meta["val"].shape
    if reduced.shape != shape or reduced.stride() != member.strides:
        reduced = reduced.as_strided(shape, member.strides)
    return reduced


def _as_it_lies(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A contiguous tensor with the elements of ``tensor`` in the memory order of dense strides: a
    view, if ``tensor`` has that memory order. Backends take contiguous tensors only."""
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    if order != sorted(order):
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor
