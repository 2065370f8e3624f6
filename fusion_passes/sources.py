"""Looks through views for the node whose kernel stores a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.reductions import GradientReduction

_aten = torch.ops.aten
_CAST: Final = torch.ops.prims.convert_element_type.default
_SHAPES: Final = frozenset(
    (
        _aten.reshape.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
        _aten.unsqueeze.default,
    )
)


@dataclass(frozen=True)
class Source:
    """A node with a gradient's elements, and the strides with which storing them stores the
    gradient."""

    node: fx.Node
    strides: tuple[int, ...]


def source_of(reduction: GradientReduction, sent_as: torch.dtype | None = None) -> Source:
    """The node behind the views that stand between a kernel and a gradient.

    A matrix product that is transposed to become a gradient can store the gradient itself, if it
    stores transposed. Views that anything else reads too are left alone.

    Args:
        reduction: of the gradient.
        sent_as: the dtype in which the gradient is sent; a cast from it to a wider one is looked
            through like a view.
    """
    source = Source(reduction.gradient, reduction.strides)
    if any(user not in reduction.nodes for user in source.node.users):
        return source
    while (behind := _behind(source, sent_as)) is not None:
        source = behind
    return source


def _behind(source: Source, sent_as: torch.dtype | None) -> Source | None:
    node = source.node
    if not node.all_input_nodes:
        return None
    viewed = node.all_input_nodes[0]
    if len(viewed.users) != 1:
        return None
    value = viewed.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() != node.meta["val"].numel():
        return None
    if node.target is _CAST and value.dtype == sent_as:
        return Source(viewed, source.strides)
    stored = torch.empty_strided(node.meta["val"].shape, source.strides, device="meta")
    if node.target is _aten.permute.default:
        order = [dim % value.dim() for dim in node.args[1]]  # type: ignore[union-attr, operator]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return Source(viewed, stored.permute(inverse).stride())
    if node.target in _SHAPES:
        try:
            return Source(viewed, stored.view(value.shape).stride())
        except RuntimeError:
            return None  # These strides are none of the viewed shape.
    return None
