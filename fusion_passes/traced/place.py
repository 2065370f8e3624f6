"""Moves launches to early places and waits to late ones, and reports where they are."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import is_wait, issue_order
from fusion_passes.graph.custom_ops import PACK, WIDEN
from fusion_passes.graph.families import (
    CASTS,
    DIVISIONS,
    DIVISIONS_OF_LISTS,
    ITEMS,
    RELAYOUTS,
    VIEWS,
    is_library_kernel,
)
from fusion_passes.traced.dependencies import SortKey, reorder
from fusion_passes.traced.owners import DdpGroups
from fusion_passes.traced.verify import GraphPass

# Operators that may stand between a gradient and its launch. They cost less than a late launch,
# whatever they do to the elements. The first set works on one gradient, the second on a bucket.
_PACKING: Final = VIEWS | RELAYOUTS | CASTS | DIVISIONS
_PACKING_ALL: Final = DIVISIONS_OF_LISTS | {PACK}
# Operators that give a result its place, shape, layout and dtype: no reason to wait for it yet.
_SETTLING: Final = VIEWS | CASTS | DIVISIONS | ITEMS | {WIDEN}


@dataclass(frozen=True)
class PlaceReductions(GraphPass):
    """Launches each of DDP's reductions as soon as its last gradient exists, and waits for it just
    before the first use of its result.

    Before::

        g0 -> div -> all_reduce -> wait -> split
        compute a, compute b
        return wait

    After: ``g0, div, all_reduce, compute a, compute b, wait, split``. The nodes that pack and scale
    a bucket move with its launch, and the nodes that split it move with its wait. The launches on
    one process group, DDP's and others, keep their order. Other nodes move only to make room. The
    graph must have its final launches.

    Attributes:
        groups: group names of DDP's modules in the graph.
    """

    groups: DdpGroups

    def __call__(self, graph: fx.Graph) -> bool:
        nodes, launches = list(graph.nodes), self.groups.launches_in(graph)
        index = {node: position for position, node in enumerate(nodes)}
        keys: dict[fx.Node, SortKey] = {node: (index[node],) for node in nodes}
        for launch in launches:
            _launch_early(launch, keys, index)
        late = _settled_results(nodes, launches)
        for node in reversed(late):
            if node.users:  # Right before the first use by any other node.
                places = (keys[u] if u in late else (keys[u][0] - 0.5,) for u in node.users)
                keys[node] = min(places)
        return bool(launches) and reorder(graph, keys, issue_order(nodes, self.groups.queue_of))


def _launch_early(start: fx.Node, keys: dict[fx.Node, SortKey], index: dict[fx.Node, int]) -> None:
    """Give a launch, and the nodes that pack its bucket, keys right after the last gradient."""
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
        # An item of any other list is one of several gradients that a single kernel produces.
        return node.all_input_nodes[0].target in _PACKING_ALL
    # A division by a tensor computes a gradient; a division by a number scales one.
    return node.target in _PACKING_ALL or (
        node.target in _PACKING and len(node.all_input_nodes) == 1
    )


# --- Where launches and waits are ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one of DDP's collectives is waited for, and why.

    A collective can hide behind library kernels: matrix products, convolutions and attention.

    Attributes:
        reader: first node that reads a result; ``None`` if no node does.
        overlapped: number of library kernels between launch and wait.
        following: number of library kernels after the launch.
    """

    reader: fx.Node | None
    overlapped: int
    following: int

    def why_waited(self) -> str:
        """Where the collective is waited for, and why, for people; empty if it has no reader."""
        if self.reader is None:
            return ""
        if self.overlapped == self.following:
            return "at the end"
        return (
            f"early, because {self.reader.name} ({self.reader.target}) reads it: "
            f"{self.overlapped} of the {self.following} library kernels after its launch run before"
        )


def placements_of(graph: fx.Graph, launches: Sequence[fx.Node]) -> tuple[Placement, ...]:
    """The placement of each of these launches, in a graph whose waits stand right before the first
    node that reads a result."""
    nodes = list(graph.nodes)
    kernels = [*accumulate((is_library_kernel(node) for node in nodes), initial=0)]
    index = {node: position for position, node in enumerate(nodes)}
    late = _settled_results(nodes, launches)
    readers: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes if node not in late else ():
            for launch in late.get(source, ()):
                readers.setdefault(launch, node)
    placements = []
    for launch in launches:
        before, reader = kernels[index[launch]], readers.get(launch)
        waited = kernels[-1] if reader is None else kernels[index[reader]]
        placements.append(Placement(reader, waited - before, kernels[-1] - before))
    return tuple(placements)


def _settled_results(
    nodes: Sequence[fx.Node], launches: Collection[fx.Node]
) -> dict[fx.Node, set[fx.Node]]:
    """The waits for ``launches``, and the nodes that only give the results their place, shape,
    layout and dtype, in the order of ``nodes``; each with the launches whose results it holds."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        sources = node.all_input_nodes
        if is_wait(node):
            is_item = sources[0].target is operator.getitem
            launch = sources[0].all_input_nodes[0] if is_item else sources[0]
            if launch in launches:
                found[node] = {launch}
        elif _settles(node) and found.keys() >= set(sources):
            found[node] = set().union(*(found[source] for source in sources))
    return found


def _settles(node: fx.Node) -> bool:
    if node.target in DIVISIONS_OF_LISTS:
        return True
    return node.target in _SETTLING and len(node.all_input_nodes) == 1
