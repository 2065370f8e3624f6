"""Puts gradient reductions into the backward that AOTAutograd has made with a forward.

There, a gradient is an output of the graph, in the place that its parameter has among the inputs
of the forward. What is put in is what DDP's hook traces elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import ALL_REDUCE, WAIT
from fusion_passes.graph.edits import record
from fusion_passes.reductions.find import find_gradient_reductions
from fusion_passes.reductions.owners import DdpGroups, OwnerOf
from fusion_passes.torch_private.inductor import let_outputs_lie


@dataclass(frozen=True)
class ReducedInput:
    """An input of a compiled forward that is a parameter of a DDP module.

    Attributes:
        index: among the inputs of the forward.
        name: the group name for the reduction of its gradient.
        world_size: number of ranks.
        shape: of the parameter.
        strides: in which its gradient is sent, and comes back.
    """

    index: int
    name: str
    world_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def is_aot_backward(graph: fx.Graph) -> bool:
    """Whether AOTAutograd has made the graph for the backward of a forward."""
    # Its partitioner gives the gradients of the outputs this name (torch 2.11 to 2.15).
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def insert_reductions(
    graph: fx.Graph,
    inputs: Sequence[ReducedInput],
    num_inputs: int,
    owner_of: OwnerOf,
    *,
    needs_all: bool = False,
) -> bool:
    """Average the gradients of these inputs over the ranks.

    Args:
        graph: a backward of AOTAutograd's; changed in place.
        inputs: whose gradients are averaged.
        num_inputs: of the forward.
        owner_of: says which collectives are DDP's.
        needs_all: whether all of them must have a gradient.

    Returns:
        Whether it was done: not where the outputs are not the gradients of the inputs alone, a
        gradient is none that can be reduced with others, or one is missing and must not.
    """
    output = graph.output_node()
    gradients: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    if len(gradients) != num_inputs:
        return False
    wanted = [(item, gradients[item.index]) for item in inputs]
    present = [(item, node) for item, node in wanted if node is not None]
    if needs_all and len(present) < len(wanted):
        return False
    if not present or not all(_can_be_reduced(node, item.shape) for item, node in present):
        return False
    before, added = output.args, []
    for item, node in present:
        gradients[item.index], nodes = _reduce(node, item)
        added += nodes
    output.args = (tuple(gradients),)
    found = find_gradient_reductions(graph, DdpGroups.of(graph, owner_of))
    if len(found.reductions) == len(present):
        # Else Inductor copies an average into the layout that the gradient had, and autograd copies
        # it back into that of the parameter.
        let_outputs_lie(output, {item.index: item.strides for item, _ in present})
        return True
    output.args = before
    for node in reversed(added):
        graph.erase_node(node)
    return False


def _can_be_reduced(node: object, shape: tuple[int, ...]) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and tuple(value.shape) == shape
    )


def _reduce(gradient: fx.Node, item: ReducedInput) -> tuple[fx.Node, list[fx.Node]]:
    """The average of a gradient, and all new nodes in order."""

    def reduce(tensors: list[Tensor]) -> list[Tensor]:
        (local,) = tensors
        return [WAIT(ALL_REDUCE(local / item.world_size, "sum", item.name))]

    following = gradient.next
    while following.op == "placeholder":
        following = following.next
    (result,), nodes = record(following, reduce, [gradient])
    # What is fused comes back as it is sent, and autograd takes a gradient in any layout.
    value = result.meta["val"]
    with value.fake_mode:
        result.meta["val"] = torch.empty_strided(
            value.shape, item.strides, dtype=value.dtype, device=value.device
        )
    return result, nodes
