"""Fuses the reductions of a bucket into one collective over many tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fusion_passes.collectives import all_reduce_coalesced
from fusion_passes.hook_form import NO_SCALING
from fusion_passes.planning import Bucket
from fusion_passes.reductions import GradientReduction
from fusion_passes.rewrite import Replacement, cast, replace_buckets, scale_by


@dataclass(frozen=True)
class FuseByCoalescing:
    """One ``all_reduce_coalesced`` for each bucket; no buffer of our own.

    Before, for two gradients::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0
        g1: f32[8]    -> div(2) -> all_reduce(sum) -> wait -> user1

    After::

        s0, s1 = _foreach_div([g0, g1], 2)
        r0, r1 = all_reduce_coalesced([s0, s1], sum)
        r0: f32[4, 8] -> wait -> user0
        r1: f32[8]    -> wait -> user1

    Where the plan lets the collective average, nothing is left but the collective. Gradients are
    sent as they lie in memory, whatever the order of their dimensions; where they are sent in a
    smaller dtype, each is cast before and back behind its wait.

    Each result has the shape, dtype and strides of the reduction that it replaces. Empty buckets
    are left alone.

    Attributes:
        buckets: which reductions to fuse; from :func:`fusion_passes.planning.plan_buckets` for
            the graph that the pass is called with.
        foreign: the other collectives of the graph, in order; they keep it.
    """

    buckets: tuple[Bucket, ...]
    foreign: tuple[fx.Node, ...] = ()

    def __call__(self, graph: fx.Graph) -> bool:
        return replace_buckets(graph, self.buckets, self.foreign, self._replacement_for)

    def _replacement_for(self, _: int, bucket: Bucket) -> Replacement:
        gradients = tuple(member.gradient for member in bucket.members)
        return Replacement(gradients, functools.partial(_reduce, bucket))


def _reduce(bucket: Bucket, gradients: list[Tensor]) -> list[Tensor]:
    """The averaged gradients, each a tensor of its own."""
    key, way, scaling = bucket.key, bucket.scaling.way, bucket.scaling.scaling
    flat = [_as_it_lies(m, g) for m, g in zip(bucket.members, gradients, strict=True)]
    before = scaling if way != "result" else NO_SCALING
    sent = [cast(tensor, key.reduce_dtype.to_real()) for tensor in scale_by(before, flat)]
    reduced = all_reduce_coalesced(sent, bucket.scaling.reduce_op, key.group_name)
    results = [cast(tensor, key.dtype.to_real()) for tensor in reduced]
    if way == "result":
        results = scale_by(scaling, results)
    return [_in_place(m, result) for m, result in zip(bucket.members, results, strict=True)]


def _as_it_lies(member: GradientReduction, gradient: Tensor) -> Tensor:
    """A contiguous tensor with the elements in the order in which the result lies in memory: a
    view, if the gradient lies so too. Backends take contiguous tensors only."""
    order = sorted(range(gradient.dim()), key=lambda dim: -member.strides[dim])
    if order != sorted(order):
        gradient = gradient.permute(order)
    if not gradient.is_contiguous():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _in_place(member: GradientReduction, reduced: Tensor) -> Tensor:
    if member.key.dtype.is_complex:
        reduced = torch.view_as_complex(reduced)
    shape = member.result.meta["val"].shape
    if reduced.shape == shape and reduced.stride() == member.strides:
        return reduced
    return reduced.as_strided(shape, member.strides)
