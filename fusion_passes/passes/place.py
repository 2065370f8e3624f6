"""Places launches early and waits late."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.collectives import group_name_of, is_launch, is_wait
from fusion_passes.dependencies import SortKey, reorder
from fusion_passes.operators import PACK, WIDEN
from fusion_passes.reductions import OwnerOf

_aten = torch.ops.aten
# What stands between a gradient and its launch, and costs less than a launch that is late:
# what works on one gradient, and what works on all of a bucket.
_PACKING: Final = frozenset(
    (
        _aten.reshape.default,
        _aten.view.default,
        _aten.clone.default,
        _aten.div.Tensor,
        _aten.div.Scalar,
        _aten.mul.Tensor,
        _aten.mul.Scalar,
        _aten.view_as_real.default,
        _aten.permute.default,
        torch.ops.prims.convert_element_type.default,
    )
)
_PACKING_ALL: Final = frozenset((PACK, _aten._foreach_div.Scalar, _aten._foreach_mul.Scalar))
# What brings a result into its place, shape, layout and dtype, and is no reason to wait for it.
_SETTLING: Final = frozenset(
    (
        WIDEN,
        _aten.as_strided.default,
        _aten.permute.default,
        _aten.div.Tensor,
        _aten.mul.Tensor,
        _aten.reshape.default,
        _aten.view.default,
        _aten.view_as_complex.default,
        _aten.clone.default,
        _aten.copy.default,
        torch.ops.prims.convert_element_type.default,
        operator.getitem,
    )
)


@dataclass(frozen=True)
class PlaceReductions:
    """Launches each of DDP's reductions as soon as its last gradient exists, and waits for it
    just before the first use of its result.

    Before::

        g0 -> div -> all_reduce -> wait -> split
        compute a, compute b
        return wait

    After: ``g0, div, all_reduce, compute a, compute b, wait, split``. What packs and scales a
    bucket goes with the launch, what splits it goes with the wait. Launches on one process group
    keep their order, DDP's and others alike, and no other node moves but to make room for that.

    Attributes:
        owner_of: says which collectives are DDP's, and on which process group they are.
    """

    owner_of: OwnerOf

    def __call__(self, graph: fx.Graph) -> bool:
        nodes = list(graph.nodes)
        owned = [node for node in nodes if self._is_owned(node)]
        if not owned:
            return False
        index = {node: position for position, node in enumerate(nodes)}
        keys: dict[fx.Node, SortKey] = {node: (index[node],) for node in nodes}
        for start in owned:
            _launch_early(start, keys, index)
        _wait_late(nodes, set(owned), keys)
        return reorder(graph, keys, self._issue_order(nodes))

    def _is_owned(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_launch(node):
            return False
        name = group_name_of(node)
        return name is not None and self.owner_of(name) is not None

    def _issue_order(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """The launches of each process group in their order: a group has one queue, and its
        ranks must fill it alike."""
        queues: dict[str, list[fx.Node]] = {}
        for node in nodes:
            if node.op == "call_function" and is_launch(node):
                name = group_name_of(node) or ""
                owner = self.owner_of(name)
                queues.setdefault(owner.process_group if owner else name, []).append(node)
        return list(queues.values())


def _launch_early(start: fx.Node, keys: dict[fx.Node, SortKey], index: dict[fx.Node, int]) -> None:
    """Keys for a launch and what packs its bucket: right behind the last gradient."""
    chain = {start: None}
    pending = [start]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in chain and _packs(source) and all(u in chain for u in source.users):
                chain[source] = None
                pending.append(source)
    ready = max(
        (index[source] for node in chain for source in node.all_input_nodes if source not in chain),
        default=index[start],
    )
    for node in sorted(chain, key=index.__getitem__):
        keys[node] = (ready, index[node])


def _packs(node: fx.Node) -> bool:
    """Whether a node only prepares gradients to be sent."""
    if node.target is operator.getitem:
        # Else it is one of several gradients that a single kernel produces.
        return node.all_input_nodes[0].target in _PACKING_ALL
    # A product of two tensors is a gradient, a product with a number is a scaling.
    return node.target in _PACKING_ALL or (
        node.target in _PACKING and len(node.all_input_nodes) == 1
    )


def _wait_late(nodes: Sequence[fx.Node], owned: set[fx.Node], keys: dict[fx.Node, SortKey]) -> None:
    """Keys for the waits of ``owned``, and for what settles their results: right before the first
    use by anything else."""
    late: set[fx.Node] = set()
    for node in nodes:
        if is_wait(node):
            if _launch_of(node.all_input_nodes[0]) in owned:
                late.add(node)
        elif _settles(node) and _settled(node) in late:
            late.add(node)
    for node in reversed(nodes):
        if node in late and node.users:
            keys[node] = min(
                keys[user] if user in late else (keys[user][0] - 0.5,) for user in node.users
            )


def _settles(node: fx.Node) -> bool:
    one_input = len(node.all_input_nodes) == 1 or node.target is _aten.copy.default
    return node.target in _SETTLING and one_input


def _settled(node: fx.Node) -> fx.Node:
    """The node whose value is brought into place; a copy reads no more than the layout of what it
    replaces."""
    return node.all_input_nodes[-1 if node.target is _aten.copy.default else 0]


def _launch_of(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]
