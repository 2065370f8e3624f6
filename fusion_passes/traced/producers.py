"""Finds the node whose kernel stores a gradient, by looking through views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.graph.families import CASTS, PERMUTES, RESHAPES
from fusion_passes.traced.find import GradientReduction

# The strides of these views determine those of their inputs. Views of a part are not among them:
# they have other elements than their inputs.
_VIEWS: Final = RESHAPES | PERMUTES


@dataclass(frozen=True)
class Source:
    """A node with the elements of a gradient. A kernel that stores the node with these strides
    stores the gradient."""

    node: fx.Node
    strides: tuple[int, ...]


def source_of(reduction: GradientReduction, sent_as: torch.dtype | None = None) -> Source:
    """The node from which one view after another leads to a gradient.

    A matrix product that is transposed to become a gradient can store the gradient itself, if it
    stores its result transposed. A view is not looked through if any other node reads it or its
    input. A cast from ``sent_as``, the dtype in which the gradient is sent, to a wider dtype is
    looked through like a view.
    """
    source = Source(reduction.gradient, reduction.strides)
    if any(user not in reduction.nodes for user in source.node.users):
        return source
    while (viewed := _viewed_by(source, sent_as)) is not None:
        source = viewed
    return source


def _viewed_by(source: Source, sent_as: torch.dtype | None) -> Source | None:
    """The source that ``source`` is a view or cast of; ``None`` if it is neither, or if another
    node reads the input of the view or cast."""
    node = source.node
    viewed = node.all_input_nodes[0] if node.all_input_nodes else None
    value = viewed.meta.get("val") if viewed is not None and len(viewed.users) == 1 else None
    # No sizes are compared for other nodes: comparing symbolic sizes would specialize them.
    if not isinstance(value, Tensor) or node.target not in CASTS | _VIEWS:
        return None
    strides = None
    if node.target in CASTS and value.dtype == sent_as:
        strides = source.strides
    elif node.target in _VIEWS:
        strides = _strides_of_viewed(node, value, source.strides)
    return Source(viewed, strides) if viewed is not None and strides is not None else None


def _strides_of_viewed(
    view: fx.Node, viewed: Tensor, strides: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The strides of a view's input that give the view these strides; ``None`` if none do."""
    stored = torch.empty_strided(view.meta["val"].shape, strides, device="meta")
    if view.target in PERMUTES:
        order = [dim % viewed.dim() for dim in view.args[1]]  # type: ignore[union-attr, operator]
        return stored.permute(sorted(range(len(order)), key=order.__getitem__)).stride()
    try:
        return stored.view(viewed.shape).stride()
    except (RuntimeError, ValueError):  # ValueError: from Python implementations.
        return None
