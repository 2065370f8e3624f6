"""Tells where DDP's collectives are launched and waited for in a graph. Pure."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import is_wait
from fusion_passes.graph.custom_ops import WIDEN
from fusion_passes.graph.families import (
    CASTS,
    DIVISIONS,
    DIVISIONS_OF_LISTS,
    ITEMS,
    VIEWS,
    is_library_kernel,
)

# Operators that give a result its place, shape, layout and dtype: no reason to wait for it yet.
_SETTLING: Final = VIEWS | CASTS | DIVISIONS | ITEMS | {WIDEN}


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
    late = settled_results(nodes, launches)
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


def settled_results(
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
