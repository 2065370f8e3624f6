"""What is traced of a gradient's hook around a collective: a cast and a scaling before it; after
the wait, a cast back or a change of layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.graph.families import CAST, COPY, DIVISIONS, MULTIPLICATIONS
from fusion_passes.graph.scaling import NO_SCALING, Scaling, ScalingKind

_EMPTY: Final = (torch.ops.aten.new_empty_strided.default, torch.ops.aten.empty_strided.default)
_SCALES: Final[Mapping[object, ScalingKind]] = MappingProxyType(
    {**dict.fromkeys(DIVISIONS, "div"), **dict.fromkeys(MULTIPLICATIONS, "mul")}
)


def source_of_launch(
    tensor: fx.Node, start: fx.Node
) -> tuple[fx.Node, tuple[fx.Node, ...], Scaling]:
    """The gradient, the nodes that cast and scale it for this reduction alone, and by what."""
    scaling, nodes = NO_SCALING, []
    user = start
    kind = _SCALES.get(tensor.target)
    if kind is not None and list(tensor.users) == [user] and _is_scaling(tensor):
        scaling = Scaling(kind, tensor.args[1])  # type: ignore[arg-type]
        nodes.append(tensor)
        user, tensor = tensor, tensor.args[0]  # type: ignore[assignment]
    if tensor.target is CAST and list(tensor.users) == [user]:
        source = tensor.all_input_nodes[0]
        wider = source.meta["val"].dtype.itemsize > tensor.meta["val"].dtype.itemsize
        if wider and source.meta["val"].is_floating_point():
            nodes.append(tensor)
            tensor = source
    return tensor, tuple(reversed(nodes)), scaling


def _is_scaling(node: fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    gradient, factor = node.args
    return (
        isinstance(gradient, fx.Node)
        and isinstance(factor, int | float)
        and math.isfinite(factor)
        and gradient.meta["val"].dtype == node.meta["val"].dtype
        and gradient.meta["val"].shape == node.meta["val"].shape
    )


def settled_result(wait: fx.Node) -> fx.Node:
    """The wait, or the node that does no more than to bring its result into dtype and layout."""
    if len(wait.users) != 1:
        return wait
    (user,) = wait.users
    value, settled = wait.meta["val"], user.meta.get("val")
    if not isinstance(settled, Tensor) or not settled.is_floating_point():
        return wait
    if user.target is COPY:
        is_relaid = user.args[1] is wait and settled.shape == value.shape and value.numel()
        return user if is_relaid and is_dense(settled) else wait
    return user if user.target is CAST else wait


def layout_template(settled: fx.Node) -> tuple[fx.Node, ...]:
    """What a copy that settles a result is given only for its layout."""
    target = settled.args[0]
    if settled.target is not COPY or not isinstance(target, fx.Node) or len(target.users) > 1:
        return ()
    return (target,) if target.target in _EMPTY else ()


def is_dense(value: Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
