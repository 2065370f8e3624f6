"""Finds DDP's gradient reductions in a traced backward and decodes each one once into types.

A gradient that :func:`fusion_passes.ddp.module.reduce_in_graph` reduces appears in the graph as::

    gradient -> div(number of ranks) -> all_reduce(sum) -> wait -> ...

A reduction is recognised by this structure and by its group name. A DDP module under the flag
reduces over group names of its own, so an all-reduce of tensor parallelism or of user code is never
mistaken for one of DDP's.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from fusion_passes.graph.families import DIVISIONS
from fusion_passes.graph.text import dtype_name
from fusion_passes.traced.owners import DdpGroups, Owner


@dataclass(frozen=True)
class ReductionKey:
    """The common properties of a bucket's reductions: only reductions with equal keys share one.

    Attributes:
        group_name: group name of the DDP module.
        dtype: dtype of the gradients.
        device: device of the gradients.
        divisor: number that the gradients are divided by before they are summed.
    """

    group_name: str
    dtype: torch.dtype
    device: torch.device
    divisor: float

    def __str__(self) -> str:
        division = "" if self.divisor == 1 else f" / {self.divisor:g}"
        # Without the device's index: it differs between ranks, but their texts must be equal.
        where = f"{dtype_name(self.dtype)} {self.device.type} on {self.group_name}"
        return f"sum(gradient{division}) {where}"


@dataclass(frozen=True, eq=False)
class GradientReduction:
    """One gradient reduction of DDP.

    Attributes:
        gradient: node that is reduced, before the division.
        nodes: nodes of the reduction, each before its users: the division (if no other node uses
            it), the launch and the wait.
        start: launch node.
        wait: wait node, the only user of ``start``; other nodes read the result from it.
        strides: strides of the gradient's place in a bucket, in elements.
        key: what this reduction shares with the reductions that it can be fused with.
        num_bytes: size of the gradient, in bytes.
        position: index of ``start`` in the graph.
        owner: DDP module and parameter of the gradient.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    start: fx.Node
    wait: fx.Node
    strides: tuple[int, ...]
    key: ReductionKey
    num_bytes: int
    position: int
    owner: Owner


@dataclass(frozen=True, eq=False)
class Rejection:
    """A collective that is not fused.

    Attributes:
        node: launch node of the collective.
        reason: why it is not fused, for people.
        owner: DDP module and parameter, if the collective reduces a gradient of DDP all the same;
            ``None`` for any other collective.
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
    """All gradient reductions of DDP in a graph, and a rejection for every other collective. The
    graph is functional, has ATen operators, and a fake value in each ``meta["val"]``."""
    reductions: list[GradientReduction] = []
    rejections: list[Rejection] = []
    for position, node in enumerate(graph.nodes):
        if not is_launch(node):
            continue
        owner = groups.owner_of(node)
        found = _decode(node, position, owner)
        if isinstance(found, GradientReduction):
            reductions.append(found)
        else:
            is_gradient = owner is not None and owner.number >= 0
            rejections.append(Rejection(node, found, owner if is_gradient else None))
    return FoundReductions(tuple(reductions), tuple(rejections))


def _decode(node: fx.Node, position: int, owner: Owner | None) -> GradientReduction | str:
    """The reduction that ``node`` launches, or the reason why it cannot be fused."""
    call = decode_all_reduce(node)
    if call is None:
        return f"it is not an all-reduce of one tensor, on group {group_name_of(node)!r}"
    if call.group_name is None:
        return "its process group is not given by name"
    if owner is None:
        return (
            f"group {call.group_name!r} belongs to no DistributedDataParallel module that was "
            "constructed under ddp_fusion"
        )
    return _unsupported(node, call, owner) or _reduction(node, call, owner, position)


def _reduction(
    node: fx.Node, call: AllReduceNode, owner: Owner, position: int
) -> GradientReduction:
    (wait,) = node.users
    value = node.meta["val"]
    gradient, divisor, division = call.tensor, 1.0, list[fx.Node]()
    if _divides_for(node, gradient):
        division = [gradient]
        gradient, divisor = gradient.args  # type: ignore[assignment]
    return GradientReduction(
        gradient=gradient,
        nodes=(*division, node, wait),
        start=node,
        wait=wait,
        strides=owner.strides if owner.strides is not None else tuple(value.stride()),
        key=ReductionKey(owner.group_name, value.dtype, value.device, divisor),
        num_bytes=value.numel() * value.element_size(),
        position=position,
        owner=owner,
    )


def _divides_for(launch: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` divides a gradient by a number, for this launch alone."""
    return (
        node.target in DIVISIONS
        and isinstance(node.args[1], int | float)
        and not node.kwargs
        and list(node.users) == [launch]
    )


def _unsupported(node: fx.Node, call: AllReduceNode, owner: Owner) -> str | None:
    value = node.meta.get("val")
    users = list(node.users)
    reason = None
    if owner.number < 0:
        reason = "it already reduces a bucket"
    elif node.target is not ALL_REDUCE:
        reason = "it is an in-place all-reduce"
    elif call.reduce_op != "sum":
        reason = f"its reduce op is {call.reduce_op or 'a premultiplied sum'}, not sum"
    elif len(users) != 1 or not is_wait(users[0]):
        names = ", ".join(user.name for user in users) or "nothing"
        reason = f"its result is read by {names}, not by a single wait"
    elif not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        reason = "its node has no metadata of a dense tensor"
    elif value.is_complex():
        reason = f"its dtype is {dtype_name(value.dtype)}, and complex gradients are not traced"
    elif not all(isinstance(size, int) for size in value.shape):
        reason = f"its shape {tuple(value.shape)} is symbolic, unlike a parameter's shape"
    return reason
