"""Has a compiled backward store gradients in the memory of reducers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import is_launch
from fusion_passes.graph.edits import pin, record
from fusion_passes.graph.families import is_library_kernel
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.reducer.operators import BUCKET, STORE_GRADIENTS
from fusion_passes.stored.pieces import StoredInput, StoredPiece, plan_pieces
from fusion_passes.torch_private.inductor import set_output_strides


@dataclass(frozen=True)
class StoreGradients:
    """Stores the gradients of DDP modules in memory of their reducers, piece by piece, and says so
    behind the last of each.

    The graph is a backward that AOTAutograd has made with a forward. Before::

        w_grad: f32[4, 4] = mm(...)
        b_grad: f32[4] = sum(...)
        return [w_grad, b_grad, None]

    After::

        bucket: f32[20] = bucket([0, 1], [0, 16], 20, float32, cpu)
        w_grad: f32[4, 4] = mm(...)
        b_grad: f32[4] = sum(...)
        store_gradients_(bucket, [w_grad, b_grad], [0, 16], [4, 1, 1], [0, 1])
        return [as_strided(bucket, [4, 4], [4, 1], 0), as_strided(bucket, [4], [1], 16), None]

    The library kernel that follows is bound to run after the store. If the graph has collectives of
    its own, they and the stores keep their order. Nothing else of DDP is in the graph: no group, no
    name, no collective and no wait. What is left alone: gradients that are sparse, of symbolic
    sizes, or of another shape or dtype than their parameter.

    Attributes:
        inputs: of the forward, those whose gradients are stored.
        num_inputs: of the forward.
        caps: of each module.
    """

    inputs: tuple[StoredInput, ...]
    num_inputs: int
    caps: tuple[BucketCaps, ...]

    def __call__(self, graph: fx.Graph) -> bool:
        output = graph.output_node()
        gradients: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        if not _is_aot_backward(graph) or len(gradients) != self.num_inputs:
            # Not so many: AOTAutograd has put one input in the place of several that share memory
            # and are written, and has numbered all anew. Nothing else changes the numbers of
            # tensors that are no subclasses (torch 2.13).
            return False
        if graph.find_nodes(op="call_function", target=BUCKET, sort=False):
            return False  # It has been here.
        stored = [
            (item, gradients[item.index])
            for item in self.inputs
            if _can_be_stored(gradients[item.index], item)
        ]
        seen: set[fx.Node] = set()
        stored = [(item, node) for item, node in stored if not (node in seen or seen.add(node))]  # type: ignore[func-returns-value]
        if not stored:
            return False
        node_of = {item.index: node for item, node in stored}
        order = {node: index for index, node in enumerate(graph.nodes)}
        stores = []
        for piece in plan_pieces(graph, stored, self.caps):
            nodes = [node_of[item.index] for item in piece.inputs]
            store, results = _store(piece, nodes, order)
            stores.append(store)
            for item, result in zip(piece.inputs, results, strict=True):
                gradients[item.index] = result
        output.args = (tuple(gradients),)
        set_output_strides(output, {item.index: item.strides for item, _ in stored})
        _pin_behind(graph, {store: store.args[0] for store in stores})
        return True

    def identity(self) -> str:
        """What a cached graph depends on."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _is_aot_backward(graph: fx.Graph) -> bool:
    """Whether AOTAutograd has made the graph for the backward of a forward."""
    # Its partitioner gives the gradients of the outputs this name (torch 2.11 to 2.15).
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def _can_be_stored(node: object, item: StoredInput) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype == item.dtype
        and value.device == item.device
        and tuple(value.shape) == item.shape
    )


def _store(
    piece: StoredPiece, nodes: Sequence[fx.Node], order: dict[fx.Node, int]
) -> tuple[fx.Node, list[fx.Node]]:
    """Write what stores a piece. Return its node, and the gradients as they lie in the memory."""
    in_order = sorted(nodes, key=lambda node: order[node])
    first, last = in_order[0], in_order[-1]
    graph = first.graph
    positions = [item.position for item in piece.inputs]
    dtype, device = piece.inputs[0].dtype, piece.inputs[0].device
    offsets = list(piece.offsets)
    # Not before it is needed: what the forward has saved is freed meanwhile.
    with graph.inserting_before(first):
        bucket = graph.call_function(BUCKET, (positions, offsets, piece.numel, dtype, device))
    with nodes[0].meta["val"].fake_mode:
        bucket.meta["val"] = torch.empty(piece.numel, dtype=dtype, device=device)
    following = last.next
    while following.op == "placeholder" or following.target is BUCKET:
        following = following.next
    strides = [stride for item in piece.inputs for stride in item.strides]
    with graph.inserting_before(following):
        arguments = (bucket, list(nodes), offsets, strides, positions)
        store = graph.call_function(STORE_GRADIENTS, arguments)
    store.meta["val"] = None

    def as_they_lie(tensors: list[Tensor]) -> list[Tensor]:
        (memory,) = tensors
        return [
            memory.as_strided(item.shape, item.strides, offset)
            for item, offset in zip(piece.inputs, piece.offsets, strict=True)
        ]

    results = record(following, as_they_lie, [bucket])
    return store, results


def _pin_behind(graph: fx.Graph, memory_of: Mapping[fx.Node, Any]) -> None:
    """Have the next library kernel, and the next collective that is not DDP's, run after the stores
    before it: Inductor's scheduler moves nodes. Of such a collective, the order among the launches
    of buckets must be that of ranks with other graphs; the other order, of a store behind a
    collective, its lowering keeps.

    Args:
        graph: the backward.
        memory_of: the memory of each store.
    """
    for must_follow in (is_library_kernel, is_launch):
        before: list[fx.Node] = []
        for node in list(graph.nodes):
            if node in memory_of:
                before.append(memory_of[node])
            elif before and node.op == "call_function" and must_follow(node):
                pin([node], before)
                before = []
