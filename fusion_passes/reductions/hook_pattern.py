"""What is traced of a gradient's hook around a collective: a cast and a scaling before it; after
the wait, a cast back or a change of layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.graph.families import CAST, COPY, DIVISIONS, MULTIPLICATIONS
from fusion_passes.graph.scaling import NO_SCALING, Scaling, ScalingKind

_COPY_IN_PLACE: Final = torch.ops.aten.copy_.default
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


def result_strides(result: fx.Node) -> tuple[int, ...]:
    """The strides in which the result is wanted: those of the existing gradient that it is copied
    to in the end, else its own."""
    targets = [_target(user).stride() for user in result.users if user.target is _COPY_IN_PLACE]
    dense = [strides for strides in targets if _is_fixed(strides)]
    if len(set(dense)) == 1 and is_only_copied(result) and is_dense(_first_target(result)):
        return tuple(dense[0])
    return tuple(result.meta["val"].stride())


def _is_fixed(strides: Sequence[object]) -> bool:
    return all(isinstance(stride, int) for stride in strides)


def is_only_copied(result: fx.Node) -> bool:
    """Whether the result is copied to existing gradients, which have a layout of their own, and
    nothing else reads it."""
    return all(user.target is _COPY_IN_PLACE and user.args[1] is result for user in result.users)


def _first_target(result: fx.Node) -> Tensor:
    return _target(next(iter(result.users)))


def _target(copy: fx.Node) -> Tensor:
    value: Tensor = copy.args[0].meta["val"]  # type: ignore[union-attr]
    return value


def is_dense(value: Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_laid_out(value: Tensor, strides: Sequence[int]) -> bool:
    """Whether the tensor has these strides, as far as they matter to where elements lie."""
    return all(
        size == 1 or have == want
        for size, have, want in zip(value.shape, value.stride(), strides, strict=True)
    )
