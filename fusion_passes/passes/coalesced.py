"""Fuses the reductions of a bucket into one collective over many tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fusion_passes.collectives import all_reduce_coalesced
from fusion_passes.planning import Bucket
from fusion_passes.reductions import ReductionKey
from fusion_passes.rewrite import replace_buckets, scale_by


@dataclass(frozen=True)
class FuseByCoalescing:
    """One scaling, one ``all_reduce_coalesced`` for each bucket; no buffer of our own.

    Before, for two gradients::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0
        g1: f32[8]    -> div(2) -> all_reduce(sum) -> wait -> user1

    After::

        s0, s1 = _foreach_div([g0, g1], 2)
        r0, r1 = all_reduce_coalesced([s0, s1], sum)
        r0: f32[4, 8] -> wait -> user0
        r1: f32[8]    -> wait -> user1

    Each result has the shape and dtype of the reduction that it replaces, and is contiguous, as
    the result of a functional all-reduce is. Buckets of one reduction are left alone.

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
    """The averaged gradients, each a tensor of its own."""
    reals = [torch.view_as_real(g) if key.dtype.is_complex else g for g in gradients]
    # Backends take contiguous tensors only.
    contiguous = [
        real if real.is_contiguous() else real.clone(memory_format=torch.contiguous_format)
        for real in reals
    ]
    scaled = scale_by(key.scaling, contiguous)
    reduced = all_reduce_coalesced(scaled, key.reduce_op, key.group_name)
    return [torch.view_as_complex(r) for r in reduced] if key.dtype.is_complex else reduced
