"""Walks the autograd graph of a backward before the engine runs: which parameters get a gradient,
and which autograd nodes contribute to it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fusion_passes.torch_private.autograd import AccumulateGrad
from fusion_passes.torch_private.dynamo import is_compiled_forward


@dataclass(frozen=True)
class Reached:
    """The result of a walk over an autograd graph.

    Attributes:
        edges: each AccumulateGrad node and the number of edges that end there, by the id of its
            tensor.
        uncompiled: ids of the tensors to whose gradients nodes contribute that are not compiled
            forwards.
        compiled: for each compiled forward, the leaves among its inputs, with their positions.
        nodes: all nodes but the AccumulateGrad nodes.
        entries: the output indices by which each compiled forward is differentiated, by node; empty
            unless they were asked for.
    """

    edges: Mapping[int, tuple[Any, int]]
    uncompiled: Collection[int]
    compiled: Mapping[Any, Sequence[tuple[int, Tensor]]]
    nodes: Collection[Any]
    entries: Mapping[Any, Collection[int]] = field(default_factory=dict)


def walk(outputs: Sequence[Any], *, with_entries: bool = False) -> Reached:
    """Walk the autograd graph from these tensors or gradient edges to its leaves; about a
    microsecond a node."""
    pending = [getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs]
    edges: dict[int, tuple[Any, int]] = {}
    compiled: dict[Any, list[tuple[int, Tensor]]] = {}
    # If the backward starts at a leaf, no compiled forward contributes to its gradient.
    roots = [node for node in pending if isinstance(node, AccumulateGrad)]
    _count(edges, roots)
    uncompiled = {id(node.variable) for node in roots}
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves = []
        for position, (following, _) in enumerate(node.next_functions):
            if isinstance(following, AccumulateGrad):
                leaves.append((position, following))
            elif following is not None:
                pending.append(following)
        if leaves:
            _count(edges, (leaf for _, leaf in leaves))
            if is_compiled_forward(node):
                compiled[node] = [(position, leaf.variable) for position, leaf in leaves]
            else:
                uncompiled.update(id(leaf.variable) for _, leaf in leaves)
    entries = _entries(outputs, seen, compiled) if with_entries else {}
    return Reached(edges, uncompiled, compiled, seen, entries)


def _entries(
    outputs: Sequence[Any], nodes: Iterable[Any], compiled: Collection[Any]
) -> dict[Any, set[int]]:
    """The output indices by which compiled forwards are differentiated, from these outputs and from
    other nodes."""
    roots = (
        (getattr(o, "grad_fn", None) or getattr(o, "node", None), o.output_nr) for o in outputs
    )
    edges = itertools.chain(roots, *(node.next_functions for node in nodes))
    found: dict[Any, set[int]] = {}
    for node, number in edges:
        if node in compiled:
            found.setdefault(node, set()).add(number)
    return found


def _count(edges: dict[int, tuple[Any, int]], nodes: Iterable[Any]) -> None:
    for node in nodes:
        leaf = id(node.variable)
        edges[leaf] = node, edges.get(leaf, (node, 0))[1] + 1
