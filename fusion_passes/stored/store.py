"""The pass that makes a compiled backward store gradients in the memory of reducers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import is_launch
from fusion_passes.graph.edits import pin, record
from fusion_passes.graph.families import is_library_kernel
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.stored.operators import BUCKET, STORE_GRADIENTS
from fusion_passes.stored.pieces import StoredInput, StoredPiece, plan_pieces
from fusion_passes.torch_private.inductor import is_aot_backward, set_output_strides


@dataclass(frozen=True)
class StoreGradients:
    """Stores the gradients of DDP modules in memory of their reducers, piece by piece, and notifies
    the reducer after the last gradient of each piece.

    The graph is the backward that AOTAutograd made with a forward. Before::

        w_grad: f32[4, 4] = mm(...)
        b_grad: f32[4] = sum(...)
        return [w_grad, b_grad, None]

    After::

        bucket: f32[20] = bucket([0, 1], [0, 16], 20, float32, cpu)
        w_grad: f32[4, 4] = mm(...)
        b_grad: f32[4] = sum(...)
        store_gradients_(bucket, [w_grad, b_grad], [0, 16], [4, 1, 1], [0, 1])
        return [as_strided(bucket, [4, 4], [4, 1], 0), as_strided(bucket, [4], [1], 16), None]

    The next library kernel gets a dependency on the store, so that it runs after the store.
    Non-DDP collectives of the graph and the stores keep their order. The graph contains nothing
    else of DDP: no process group, no module name, no collective and no wait. The pass leaves a
    gradient alone if it is sparse, if its sizes are symbolic, or if its shape, dtype or device is
    not that of its parameter.

    Attributes:
        inputs: the inputs of the forward whose gradients are stored.
        num_inputs: number of all inputs of the forward.
        caps: bucket caps of each module, by :attr:`StoredInput.module`.
    """

    inputs: tuple[StoredInput, ...]
    num_inputs: int
    caps: tuple[BucketCaps, ...]

    def __call__(self, graph: fx.Graph) -> bool:
        output = graph.output_node()
        gradients: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        if not is_aot_backward(graph) or len(gradients) != self.num_inputs:
            # The numbers differ if AOTAutograd has replaced several inputs that share memory and
            # are mutated by one (a synthetic base), which renumbers all inputs. Nothing else
            # renumbers inputs that are not tensor subclasses (torch 2.13).
            return False
        if graph.find_nodes(op="call_function", target=BUCKET, sort=False):
            return False  # This pass has already run on the graph.
        stored = [
            (item, gradients[item.index])
            for item in self.inputs
            if _can_be_stored(gradients[item.index], item)
        ]
        # A node that is the gradient of several inputs is stored for the first one.
        stored = [(item, node) for node, item in {n: item for item, n in reversed(stored)}.items()]
        if not stored:
            return False
        node_of = {item.index: node for item, node in stored}
        order = {node: index for index, node in enumerate(graph.nodes)}
        stores = []
        for piece in plan_pieces(graph, stored, self.caps):
            nodes = [node_of[item.index] for item in piece.inputs]
            store, results = _store_piece(piece, nodes, order)
            stores.append(store)
            for item, result in zip(piece.inputs, results, strict=True):
                gradients[item.index] = result
        output.args = (tuple(gradients),)
        set_output_strides(output, {item.index: item.strides for item, _ in stored})
        _pin_behind(graph, {store: store.args[0] for store in stores})
        return True

    def identity(self) -> str:
        """A hash of all that the pass reads besides the graph, for the key of a cached graph."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _can_be_stored(node: object, item: StoredInput) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.dtype == item.dtype
        and value.device == item.device
        and tuple(value.shape) == item.shape
    )


def _store_piece(
    piece: StoredPiece, nodes: Sequence[fx.Node], order: dict[fx.Node, int]
) -> tuple[fx.Node, list[fx.Node]]:
    """Add the nodes that store a piece. Return the ``store_gradients_`` node, and the views of the
    memory that replace the gradients."""
    in_order = sorted(nodes, key=lambda node: order[node])
    first, last = in_order[0], in_order[-1]
    graph = first.graph
    positions = [item.position for item in piece.inputs]
    dtype, device = piece.inputs[0].dtype, piece.inputs[0].device
    offsets = list(piece.offsets)
    # As late as possible: until then, the backward frees tensors that the forward has saved.
    with graph.inserting_before(first):
        where = json.dumps(positions), json.dumps(offsets)
        bucket = graph.call_function(BUCKET, (*where, piece.numel, dtype, device))
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
    """Make the next library kernel and the next non-DDP collective run after the stores that
    precede them: Inductor's scheduler reorders nodes. A store may launch buckets, and a non-DDP
    collective must have the same place among these launches on ranks with other graphs. The reverse
    order, a store after a collective, is kept by the lowering of the store.

    Args:
        graph: the backward.
        memory_of: the node of the memory that each store node writes.
    """
    for must_follow in (is_library_kernel, is_launch):
        before: list[fx.Node] = []
        for node in list(graph.nodes):
            if node in memory_of:
                before.append(memory_of[node])
            elif before and node.op == "call_function" and must_follow(node):
                pin([node], before)
                before = []
