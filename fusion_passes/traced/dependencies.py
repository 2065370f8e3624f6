"""The dependencies between the nodes of a graph, and orders that respect them. Each function is
linear in the size of the graph, except for the heap of :func:`reorder`."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from torch import fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import move_to_end, schema

SortKey = tuple[float, ...]
"""Where a node should stand. A smaller key stands earlier; nodes with equal keys keep their
order."""


def dependents(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on the values of ``sources``, including the sources. The graph
    is in topological order. A read after a write depends on the written value, although no edge of
    the graph says so."""
    base_of, _ = write_positions(graph.nodes)
    found: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if (
            node in sources
            or not found.isdisjoint(inputs)
            or any(base_of[source] in written for source in inputs)
        ):
            found.add(node)
            written.update(base_of[argument] for argument in written_arguments(node))
    return found


def write_positions(
    nodes: Iterable[fx.Node],
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, list[int]]]:
    """The memory that each node aliases, and the places where that memory is written.

    Returns:
        The node whose memory each node aliases (itself, if it is no view), and for each such node
        the ascending indices of the nodes that overwrite its memory.
    """
    base_of: dict[fx.Node, fx.Node] = {}
    writes: dict[fx.Node, list[int]] = {}
    for index, node in enumerate(nodes):
        base_of[node] = _base(node, base_of)
        for argument in written_arguments(node):
            writes.setdefault(base_of.get(argument, argument), []).append(index)
    return base_of, writes


def reorder(
    graph: fx.Graph, keys: Mapping[fx.Node, SortKey], chains: Sequence[Sequence[fx.Node]] = ()
) -> bool:
    """Put the nodes into the topological order that follows ``keys`` as closely as it can.

    The next node is always the one with the smallest key among those whose inputs are already
    placed. Writes keep their place among the reads of the memory that they write (see
    :func:`_write_order`).

    Args:
        graph: graph whose nodes may stand in any order, even one that is not topological; only the
            reads and writes of a value must stand in the order that is meant.
        keys: sort key of every node.
        chains: lists of nodes that must keep the order in which they are listed.

    Returns:
        Whether any node moved.

    Raises:
        ValueError: the nodes depend on each other in a cycle.
    """
    nodes = list(graph.nodes)
    successors = _successors(nodes, chains)
    missing = dict.fromkeys(nodes, 0)
    for after in successors.values():
        for node in after:
            missing[node] += 1
    index = {node: position for position, node in enumerate(nodes)}
    heap = [(keys[node], index[node]) for node in nodes if not missing[node]]
    heapq.heapify(heap)
    order: list[fx.Node] = []
    while heap:
        node = nodes[heapq.heappop(heap)[1]]
        order.append(node)
        for successor in successors[node]:
            missing[successor] -= 1
            if not missing[successor]:
                heapq.heappush(heap, (keys[successor], index[successor]))
    if len(order) != len(nodes):
        stuck = next(node for node in nodes if missing[node])
        raise ValueError(f"graph nodes depend on each other in a circle, {stuck.name} among them")
    if order == nodes:
        return False
    for node in order:
        move_to_end(graph, node)
    return True


def _successors(
    nodes: Sequence[fx.Node], chains: Sequence[Sequence[fx.Node]]
) -> dict[fx.Node, dict[fx.Node, None]]:
    successors: dict[fx.Node, dict[fx.Node, None]] = {
        node: dict.fromkeys(node.users) for node in nodes
    }
    # Placeholders keep their order: it is the calling convention.
    inputs = [node for node in nodes if node.op == "placeholder"]
    in_chains = [pair for chain in (*chains, inputs) for pair in pairwise(chain)]
    for before, after in _write_order(nodes) + in_chains:
        successors[before][after] = None
    return successors


def _write_order(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs (before, after) that keep each write after the earlier reads and writes of the same
    memory, and each later read after the write. A view counts as the tensor that it views."""
    base_of, writes = write_positions(nodes)
    readers: dict[fx.Node, list[fx.Node]] = {}
    last_write: dict[fx.Node, fx.Node] = {}
    pairs: list[tuple[fx.Node, fx.Node]] = []
    for node in nodes if writes else ():
        written = {base_of[argument] for argument in written_arguments(node)}
        for source in node.all_input_nodes:
            base = base_of[source]
            if base not in writes or base in written:
                continue
            readers.setdefault(base, []).append(node)
            if base in last_write:
                pairs.append((last_write[base], node))
        for base in written:
            pairs += [(reader, node) for reader in readers.pop(base, ()) if reader is not node]
            if base in last_write:
                pairs.append((last_write[base], node))
            last_write[base] = node
    return pairs


def _base(node: fx.Node, base_of: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The node whose memory a view aliases; the node itself if it is no view."""
    target = node.target
    is_view = target is operator.getitem or (
        isinstance(target, OpOverload)
        and any(result.alias_info is not None for result in schema(target).returns)
    )
    if is_view and node.all_input_nodes:
        source = node.all_input_nodes[0]
        return base_of.get(source, source)
    return node


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory ``node`` overwrites."""
    target = node.target
    if not isinstance(target, OpOverload) or not schema(target).is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema(target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        written += [item for item in values if isinstance(item, fx.Node)]
    return written
