"""Finds the gradient reductions of DDP in a compiled backward and decodes each once into types.

What DDP's hook computes for a gradient arrives in the graph as::

    gradient -> [cast] -> [scale] -> all_reduce -> wait -> [settle] -> ...

``scale`` is a division or a multiplication by a number; it is absent where the collective itself
averages. ``cast`` is there where a communication hook sends a smaller dtype. ``settle`` is the one
reader of the wait, if all that it does is to cast back or to change the layout: to the strides of a
channels-last parameter, for instance. What follows is no part of the reduction.

A reduction is recognised by this structure and by its group name: a DDP module under the flag
reduces over names of its own (see :mod:`fusion_passes.ddp.traced`), so a tensor-parallel
all-reduce or one that a user wrote is never taken for one of DDP's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.graph.collectives import (
    ALL_REDUCE,
    AllReduceNode,
    decode_all_reduce,
    group_name_of,
    is_launch,
    is_wait,
)
from fusion_passes.graph.families import CAST
from fusion_passes.graph.operators import PACK
from fusion_passes.graph.scaling import Scaling
from fusion_passes.reductions.hook_pattern import (
    layout_template,
    settled_result,
    source_of_launch,
)
from fusion_passes.reductions.owners import DdpGroups, Owner

REDUCE_OPS: Final = ("sum", "avg")


@dataclass(frozen=True)
class ReductionKey:
    """What reductions must have in common to share a bucket. Only equal keys do.

    Attributes:
        dtype: of the gradients, before and after.
        reduce_dtype: in which they are sent.
        scaling: what they are scaled by before they are summed, as it was traced.
    """

    group_name: str
    reduce_op: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    device: torch.device
    scaling: Scaling

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        if self.reduce_dtype != self.dtype:
            dtype += f" as {dtype_name(self.reduce_dtype)}"
        # Without the device's index: ranks have cards of their own, but must describe alike.
        where = f"{dtype} {self.device.type} on {self.group_name}"
        return f"{self.reduce_op}(gradient{self.scaling}) {where}"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class GradientReduction:
    """One gradient reduction of DDP.

    Attributes:
        gradient: the node that is reduced, before it is cast and scaled.
        nodes: all that the reduction consists of, each before its users: the cast, the
            scaling, the launch, the wait, and what settles the result, where there are such.
        start: the launch.
        wait: the only user of ``start``.
        result: the last of ``nodes``: what others read.
        strides: in which the gradient lies in a bucket.
        key: what it shares with the reductions that it can be fused with.
        num_bytes: size of the gradient.
        position: index of ``start`` in the graph.
        owner: the DDP module and parameter.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    start: fx.Node
    wait: fx.Node
    result: fx.Node
    strides: tuple[int, ...]
    key: ReductionKey
    num_bytes: int
    position: int
    owner: Owner


@dataclass(frozen=True, eq=False)
class Rejection:
    """A collective that is not fused.

    Attributes:
        node: its launch.
        reason: why, for people.
        owner: the DDP module and parameter whose gradient it reduces all the same; ``None`` for one
            that is not DDP's.
    """

    node: fx.Node
    reason: str
    owner: Owner | None = None

    def __str__(self) -> str:
        return f"{self.node.name} ({self.node.target}): {self.reason}"


@dataclass(frozen=True)
class FoundReductions:
    """Reductions and rejections, each in graph order."""

    reductions: tuple[GradientReduction, ...]
    rejections: tuple[Rejection, ...]


def find_gradient_reductions(graph: fx.Graph, groups: DdpGroups) -> FoundReductions:
    """All gradient reductions of ``graph``, and a rejection for every other collective.

    Args:
        graph: a functional graph of ATen operators with fake values in ``meta["val"]``.
        groups: the graph's names of DDP's groups.
    """
    reductions: list[GradientReduction] = []
    rejections: list[Rejection] = []
    for position, node in enumerate(graph.nodes):
        if not is_launch(node):
            continue
        found = _decode(node, position, groups)
        if isinstance(found, GradientReduction):
            reductions.append(found)
        else:
            rejections.append(Rejection(node, found, _reduced_for(node, groups)))
    return FoundReductions(tuple(reductions), tuple(rejections))


def _reduced_for(node: fx.Node, groups: DdpGroups) -> Owner | None:
    """Whose gradient a collective reduces that cannot be fused; ``None`` for any other."""
    call, owner = decode_all_reduce(node), groups.owner_of(node)
    is_gradient = (
        call is not None
        and call.reduce_op in REDUCE_OPS
        and call.tensor.target is not PACK
        and owner is not None
        and owner.number >= 0
    )
    return owner if is_gradient else None


def _decode(node: fx.Node, position: int, groups: DdpGroups) -> GradientReduction | str:
    """The reduction that ``node`` launches, or the reason why it is none."""
    call = decode_all_reduce(node)
    if call is None:
        return f"a collective of another kind, on group {group_name_of(node)!r}"
    if call.group_name is None:
        return "its process group is not given by name"
    owner = groups.owner_of(node)
    if owner is None:
        return (
            f"group {call.group_name!r} belongs to no DistributedDataParallel module that was "
            "constructed under ddp_fusion"
        )
    return _unsupported(node, call) or _reduction(node, call, owner, position)


def _reduction(
    node: fx.Node, call: AllReduceNode, owner: Owner, position: int
) -> GradientReduction:
    (wait,) = node.users
    gradient, before, scaling = source_of_launch(call.tensor, node)
    settled = settled_result(wait)
    if gradient.meta["val"].dtype != settled.meta["val"].dtype:
        # Cast on one side only: no communication in another dtype, but the gradient's own.
        cast = before and before[0].target is CAST
        gradient, before = (before[0], before[1:]) if cast else (gradient, before)
        settled = wait
    value = settled.meta["val"]
    after = (wait,) if settled is wait else (wait, settled)
    return GradientReduction(
        gradient=gradient,
        nodes=(*layout_template(settled), *before, node, *after),
        start=node,
        wait=wait,
        result=settled,
        strides=owner.strides if owner.strides is not None else tuple(value.stride()),
        key=ReductionKey(
            owner.group_name,
            call.reduce_op or "",
            value.dtype,
            node.meta["val"].dtype,
            value.device,
            scaling,
        ),
        num_bytes=value.numel() * value.element_size(),
        position=position,
        owner=owner,
    )


def _unsupported(node: fx.Node, call: AllReduceNode) -> str | None:
    value = node.meta.get("val")
    users = list(node.users)
    reason = None
    if call.tensor.target is PACK:
        reason = "it reduces a bucket already"
    elif node.target is not ALL_REDUCE:
        reason = "an in-place all-reduce"
    elif call.reduce_op not in REDUCE_OPS:
        reason = f"reduces by {call.reduce_op or 'an operation with a factor'}, not by sum or avg"
    elif len(users) != 1 or not is_wait(users[0]):
        names = ", ".join(user.name for user in users) or "nothing"
        reason = f"its result is read by {names}, not by one wait alone"
    elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        reason = "the graph does not say that it is a dense tensor"
    elif not all(isinstance(size, int) for size in value.shape):
        reason = f"its shape {tuple(value.shape)} is symbolic, but a parameter's is fixed"
    return reason
