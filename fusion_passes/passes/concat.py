"""Fuses the reductions of a bucket by packing their gradients into one flat buffer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fusion_passes.collectives import all_reduce
from fusion_passes.planning import Bucket
from fusion_passes.reductions import ReductionKey
from fusion_passes.rewrite import replace_buckets, scale_by


@dataclass(frozen=True)
class FuseByConcat:
    """One flat buffer, one scaling, one all-reduce for each bucket.

    Before, for two gradients::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0
        g1: f32[8]    -> div(2) -> all_reduce(sum) -> wait -> user1

    After::

        bucket: f32[40] = cat(reshape(g0, [-1]), reshape(g1, [-1]))
        bucket -> div(2) -> all_reduce(sum) -> wait -> split [32, 8] -> reshape [4, 8] -> user0
                                                                     -> reshape [8]    -> user1

    Each result has the shape and dtype of the reduction that it replaces, and is contiguous, as
    the result of a functional all-reduce is. A complex gradient is packed as its real and
    imaginary parts, which is how c10d reduces it. Buckets of one reduction are left alone.

    Attributes:
        buckets: which reductions to fuse; from :func:`fusion_passes.planning.plan_buckets` for
            the graph that the pass is called with.
        foreign: the other collectives of the graph, in order; they keep it.
    """

    buckets: tuple[Bucket, ...]
    foreign: tuple[fx.Node, ...] = ()

    def __call__(self, graph: fx.Graph) -> bool:
        return replace_buckets(
            graph, self.buckets, self.foreign, lambda key: functools.partial(_reduce, key)
        )


def _reduce(key: ReductionKey, gradients: list[Tensor]) -> list[Tensor]:
    """The averaged gradients, as views of one buffer."""
    reals = [torch.view_as_real(g) if key.dtype.is_complex else g for g in gradients]
    sizes = [real.numel() for real in reals if real.numel()]
    bucket = torch.cat([real.reshape(-1) for real in reals if real.numel()])
    reduced = all_reduce(scale_by(key.scaling, [bucket])[0], key.reduce_op, key.group_name)
    pieces = iter(torch.split_with_sizes(reduced, sizes))
    shaped = [_shape(next(pieces), real) if real.numel() else _empty(real) for real in reals]
    return [torch.view_as_complex(s) for s in shaped] if key.dtype.is_complex else shaped


def _shape(piece: Tensor, real: Tensor) -> Tensor:
    return piece if real.dim() == 1 else piece.view(real.shape)


def _empty(real: Tensor) -> Tensor:
    """The result for a gradient without elements: there is nothing to send, and a view of nothing
    would come back with other strides."""
    return real.clone(memory_format=torch.contiguous_format)
