"""Finds the gradient reductions of DDP in a compiled backward and decodes each once into types.

What DDP's hook computes for a gradient arrives in the graph as::

    gradient -> [scale] -> all_reduce -> wait -> ...

``scale`` is a division or a multiplication by a number; it is absent where the collective itself
averages. What follows the wait (a copy into an existing ``.grad``, a change of layout, a cast) is
no part of the reduction: it stays as it is and reads the fused result.

A reduction is recognised by this structure and by its group name: a DDP module under the flag
reduces over names of its own (see :mod:`fusion_passes.ddp.modules`), so a tensor-parallel
all-reduce or one that a user wrote is never taken for one of DDP's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import fx

from fusion_passes.collectives import (
    ALL_REDUCE,
    AllReduce,
    decode_all_reduce,
    group_name_of,
    is_launch,
    is_wait,
)

REDUCE_OPS: Final = ("sum", "avg")

_SCALES: Final[dict[object, Literal["div", "mul"]]] = {
    torch.ops.aten.div.Tensor: "div",
    torch.ops.aten.div.Scalar: "div",
    torch.ops.aten.mul.Tensor: "mul",
    torch.ops.aten.mul.Scalar: "mul",
}


@dataclass(frozen=True)
class Scaling:
    """What a gradient is divided or multiplied by before it is reduced."""

    kind: Literal["none", "div", "mul"]
    value: float = 1.0

    def __str__(self) -> str:
        return {"none": "", "div": f" / {self.value:g}", "mul": f" * {self.value:g}"}[self.kind]


NO_SCALING: Final = Scaling("none")


@dataclass(frozen=True)
class ReductionKey:
    """What reductions must have in common to share a bucket. Only equal keys do."""

    kind: Literal["all_reduce"]
    group_name: str
    reduce_op: str
    dtype: torch.dtype
    device: torch.device
    scaling: Scaling

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        # Without the device's index: ranks have cards of their own, but must describe alike.
        where = f"{dtype} {self.device.type} on {self.group_name}"
        return f"{self.reduce_op}(gradient{self.scaling}) {where}"


@dataclass(frozen=True)
class Owner:
    """Who a group name of the graph belongs to.

    Attributes:
        group_name: the name that all reductions of this DDP module share once they are fused.
        process_group: the process group's own name: names of one group issue on one queue.
        module: the DDP module, for people.
        parameter: the parameter's name in that module, for people.
    """

    group_name: str
    process_group: str
    module: str
    parameter: str


OwnerOf = Callable[[str], Owner | None]
"""The owner of a group name of the graph; ``None`` for a name that no DDP module uses."""


@dataclass(frozen=True, eq=False)
class GradientReduction:
    """One gradient reduction of DDP.

    Attributes:
        gradient: the node that is reduced, before scaling.
        scale: the node that scales it, ``None`` where there is none.
        start: the launch.
        wait: the only user of ``start``.
        sinks: the users of ``wait``, in graph order.
        key: what it shares with the reductions that it can be fused with.
        num_bytes: size of what is sent.
        position: index of ``start`` in the graph.
        owner: the DDP module and parameter.
    """

    gradient: fx.Node
    scale: fx.Node | None
    start: fx.Node
    wait: fx.Node
    sinks: tuple[fx.Node, ...]
    key: ReductionKey
    num_bytes: int
    position: int
    owner: Owner


@dataclass(frozen=True, eq=False)
class Rejection:
    """A collective that is left as it is, and why: a sentence for people."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        return f"{self.node.name} ({self.node.target}): {self.reason}"


@dataclass(frozen=True)
class FoundReductions:
    """Reductions and rejections, each in graph order."""

    reductions: tuple[GradientReduction, ...]
    rejections: tuple[Rejection, ...]


def find_gradient_reductions(graph: fx.Graph, owner_of: OwnerOf) -> FoundReductions:
    """All gradient reductions of ``graph``, and a rejection for every other collective.

    Args:
        graph: a functional graph of ATen operators with fake values in ``meta["val"]``.
        owner_of: says which DDP module a group name belongs to.
    """
    reductions: list[GradientReduction] = []
    rejections: list[Rejection] = []
    for position, node in enumerate(graph.nodes):
        if node.op != "call_function" or not is_launch(node):
            continue
        found = _decode(node, position, owner_of)
        if isinstance(found, GradientReduction):
            reductions.append(found)
        else:
            rejections.append(Rejection(node, found))
    return FoundReductions(tuple(reductions), tuple(rejections))


def _decode(node: fx.Node, position: int, owner_of: OwnerOf) -> GradientReduction | str:
    """The reduction that ``node`` launches, or the reason why it is none."""
    call = decode_all_reduce(node)
    if call is None:
        return f"a collective of another kind, on group {group_name_of(node)!r}"
    if call.group_name is None:
        return "its process group is not given by name"
    owner = owner_of(call.group_name)
    if owner is None:
        return (
            f"group {call.group_name!r} belongs to no DistributedDataParallel module that was "
            "constructed under ddp_fusion"
        )
    reason = _unsupported(node, call)
    if reason:
        return reason
    (wait,) = node.users
    gradient, scale, scaling = _scaling_of(call.tensor, node)
    value = node.meta["val"]
    return GradientReduction(
        gradient=gradient,
        scale=scale,
        start=node,
        wait=wait,
        sinks=tuple(wait.users),
        key=ReductionKey(
            "all_reduce",
            owner.group_name,
            call.reduce_op or "",
            value.dtype,
            value.device,
            scaling,
        ),
        num_bytes=value.numel() * value.element_size(),
        position=position,
        owner=owner,
    )


def _unsupported(node: fx.Node, call: AllReduce) -> str | None:
    if node.target is not ALL_REDUCE:
        return "an in-place all-reduce"
    if call.reduce_op not in REDUCE_OPS:
        return f"reduces by {call.reduce_op or 'an operation with a factor'}, not by sum or avg"
    users = list(node.users)
    if len(users) != 1 or not is_wait(users[0]):
        names = ", ".join(user.name for user in users) or "nothing"
        return f"its result is read by {names}, not by one wait alone"
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return "the graph does not say that it is a dense tensor"
    if not all(isinstance(size, int) for size in value.shape):
        return f"its shape {tuple(value.shape)} is symbolic, but a parameter's is fixed"
    return None


def _scaling_of(tensor: fx.Node, start: fx.Node) -> tuple[fx.Node, fx.Node | None, Scaling]:
    """The gradient, the node that scales it for this reduction alone, and by what."""
    kind = _SCALES.get(tensor.target)
    if kind is None or list(tensor.users) != [start] or len(tensor.args) != 2 or tensor.kwargs:
        return tensor, None, NO_SCALING
    gradient, factor = tensor.args
    if (
        not isinstance(gradient, fx.Node)
        or not isinstance(factor, int | float)
        or not math.isfinite(factor)
        or gradient.meta["val"].dtype != tensor.meta["val"].dtype
        or gradient.meta["val"].shape != tensor.meta["val"].shape
    ):
        return tensor, None, NO_SCALING
    return gradient, tensor, Scaling(kind, factor)
