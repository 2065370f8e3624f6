"""Walks the autograd graph of a backward before the engine runs: which parameters get a gradient,
and which autograd nodes contribute to it.

A compiled forward has an edge for each tensor among its inputs. If its edges to parameters are
those that another node of the same compiled forward had, they are not looked at one by one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from fusion_passes.layout.layout import InputPosition
from fusion_passes.torch_private.autograd import AccumulateGrad
from fusion_passes.torch_private.dynamo import is_compiled_forward


@dataclass(frozen=True, eq=False)
class Leaves:
    """The edges of a compiled forward that end at leaves.

    Attributes:
        positions: the indices of these edges, which are those of the forward's tensor inputs.
        nodes: the AccumulateGrad node at the end of each of these edges.
        others: the indices of the other edges.
        edges: these edges, as ``pick`` takes them out of the ``next_functions`` of an autograd
            node.
    """

    positions: tuple[InputPosition, ...]
    nodes: tuple[Any, ...]
    others: tuple[InputPosition, ...]
    pick: Callable[[Any], Any]
    edges: Any

    @staticmethod
    def of(edges: Sequence[tuple[Any, int]]) -> Leaves:
        """The leaves among these edges."""
        is_leaf = [isinstance(node, AccumulateGrad) for node, _ in edges]
        every = cast("Sequence[InputPosition]", range(len(edges)))
        positions = tuple(itertools.compress(every, is_leaf))
        others = tuple(p for p, each in zip(every, is_leaf, strict=True) if not each)
        pick = operator.itemgetter(*positions) if positions else lambda _: ()
        nodes = tuple(edges[position][0] for position in positions)
        return Leaves(positions, nodes, others, pick, pick(edges))

    def are_in(self, edges: Sequence[tuple[Any, int]]) -> bool:
        """Whether another node with these edges has the same leaves."""
        if len(edges) != len(self.positions) + len(self.others) or self.pick(edges) != self.edges:
            return False
        return not any(isinstance(edges[position][0], AccumulateGrad) for position in self.others)


@dataclass(frozen=True)
class Reached:
    """The result of a walk over an autograd graph.

    Attributes:
        compiled: the leaves of each compiled forward, by autograd node.
        uncompiled: the AccumulateGrad nodes to which an edge of another node leads, one for each
            edge.
        nodes: all nodes but the AccumulateGrad nodes.
        entries: the output indices by which each compiled forward is differentiated, by node; empty
            unless they were asked for.
    """

    compiled: Mapping[Any, Leaves]
    uncompiled: Sequence[Any]
    nodes: Collection[Any]
    entries: Mapping[Any, Collection[int]] = field(default_factory=dict)

    def edges(self) -> dict[int, tuple[Any, int]]:
        """Each AccumulateGrad node and the number of edges that end there, by the id of its
        tensor."""
        found: dict[int, tuple[Any, int]] = {}
        compiled = (leaves.nodes for leaves in self.compiled.values())
        for node in itertools.chain(self.uncompiled, *compiled):
            leaf = id(node.variable)
            found[leaf] = node, found.get(leaf, (node, 0))[1] + 1
        return found


class Walker:
    """Walks autograd graphs. It keeps the AccumulateGrad nodes of compiled forwards, and with them
    their parameters, until :meth:`forget`."""

    def __init__(self) -> None:
        # By class of the autograd node, of which each compiled forward has its own: the position of
        # the first leaf, and the leaves by the AccumulateGrad node of the first one, since blocks
        # of a model may share a compiled forward. ``None`` for classes of other nodes.
        self._known: dict[type, tuple[int, dict[Any, Leaves]] | None] = {}

    def walk(self, outputs: Sequence[Any], *, with_entries: bool = False) -> Reached:
        """Walk the autograd graph from these tensors or gradient edges to its leaves; about a
        microsecond a node."""
        pending = [getattr(o, "grad_fn", None) or getattr(o, "node", None) for o in outputs]
        compiled: dict[Any, Leaves] = {}
        # If the backward starts at a leaf, no compiled forward contributes to its gradient.
        uncompiled = [node for node in pending if isinstance(node, AccumulateGrad)]
        seen = set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            edges = node.next_functions
            leaves = self._leaves_of(node, edges)
            if leaves is not None:
                if leaves.positions:
                    compiled[node] = leaves
                pending.extend(edges[position][0] for position in leaves.others)
                continue
            for following, _ in edges:
                if isinstance(following, AccumulateGrad):
                    uncompiled.append(following)
                elif following is not None:
                    pending.append(following)
        entries = _entries(outputs, seen, compiled) if with_entries else {}
        return Reached(compiled, uncompiled, seen, entries)

    def _leaves_of(self, node: Any, edges: Sequence[tuple[Any, int]]) -> Leaves | None:
        """The leaves of a compiled forward; ``None`` if the node is another one."""
        kind = type(node)
        known = self._known.get(kind, (0, {}))
        if known is None:
            return None
        first, by_node = known
        leaves = by_node.get(edges[first][0]) if first < len(edges) else None
        if leaves is not None and leaves.are_in(edges):
            return leaves
        if not is_compiled_forward(node):
            self._known[kind] = None
            return None
        leaves = Leaves.of(edges)
        if leaves.positions:
            if leaves.positions[0] != first or len(by_node) >= _MOST_LEAVES:
                by_node = {}
            by_node[leaves.nodes[0]] = leaves
            self._known[kind] = leaves.positions[0], by_node
        return leaves

    def forget(self) -> None:
        """Forget what is known of compiled forwards."""
        self._known.clear()


_MOST_LEAVES: Final = 1024
"""Largest number of :class:`Leaves` kept for one compiled forward. Without a limit, a program that
makes new parameters in each step would keep all of them."""


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
