"""Decides where DDP's collectives are launched, and where they are waited for. Pure: moves
nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import is_launch, is_wait
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
from fusion_passes.traced.dependencies import SortKey
from fusion_passes.traced.owners import DdpGroups

# Operators that may stand between a gradient and its launch. They cost less than a late launch,
# whatever they do to the elements. The first set works on one gradient, the second on a bucket.
_PACKING: Final = VIEWS | RELAYOUTS | CASTS | DIVISIONS
_PACKING_ALL: Final = DIVISIONS_OF_LISTS | {PACK}
# Operators that give a result its place, shape, layout and dtype: no reason to wait for it yet.
_SETTLING: Final = VIEWS | CASTS | DIVISIONS | ITEMS | {WIDEN}


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one of DDP's collectives is waited for, and why.

    A collective can hide behind library kernels: matrix products, convolutions and attention.

    Attributes:
        launch: launch node of the collective.
        reader: first node that reads a result; ``None`` if no node does.
        overlapped: number of library kernels between launch and wait.
        following: number of library kernels after the launch.
    """

    launch: fx.Node
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


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """An order for the nodes of a graph.

    Attributes:
        keys: sort key of each node, for the place where it should stand.
        queues: launches of each process group, which must keep the order in which they are listed.
        placements: placements of DDP's collectives, in the order of the graph before the plan.
    """

    keys: dict[fx.Node, SortKey]
    queues: Sequence[Sequence[fx.Node]]
    placements: tuple[Placement, ...]


def plan_placement(graph: fx.Graph, groups: DdpGroups) -> PlacementPlan:
    """Plan to launch each of DDP's collectives right after the last of its inputs exists, and to
    wait for it right before the first node that reads a result.

    The placement of each collective also holds in the order that the plan gives, because library
    kernels, nodes that launches follow, and nodes that read results keep their order among each
    other. The graph must have its final launches.
    """
    nodes = list(graph.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    keys: dict[fx.Node, SortKey] = {node: (index[node],) for node in nodes}
    launches = [node for node in nodes if groups.owner_of(node) is not None]
    for launch in launches:
        _launch_early(launch, keys, index)
    readers = _wait_late(nodes, set(launches), keys)
    queues = _queues(nodes, groups)
    kernels = [*accumulate((is_library_kernel(node) for node in nodes), initial=0)]
    launched_at = _launched_at(queues, keys)
    placements = []
    for launch in launches:
        first, reader = launched_at[launch] + 1, readers.get(launch)
        end = len(nodes) if reader is None else max(int(keys[reader][0]), first)
        overlapped, following = (kernels[last] - kernels[first] for last in (end, -1))
        placements.append(Placement(launch, reader, overlapped, following))
    return PlacementPlan(keys, queues, tuple(placements))


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


def _wait_late(
    nodes: Sequence[fx.Node], launches: set[fx.Node], keys: dict[fx.Node, SortKey]
) -> dict[fx.Node, fx.Node]:
    """Give the waits for ``launches``, and the nodes that settle their results, keys right before
    the first use by any other node.

    Returns:
        That first user, by launch.
    """
    late: set[fx.Node] = set()
    launch_of: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if is_wait(node):
            source = node.all_input_nodes[0]
            launch = source.all_input_nodes[0] if source.target is operator.getitem else source
            if launch in launches:
                late.add(node)
                launch_of[node] = launch
        elif _settles(node) and late.issuperset(node.all_input_nodes):
            late.add(node)
    reader_of: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, fx.Node] = {}
    for node in reversed(nodes):
        if node in late and node.users:
            keys[node] = min(
                keys[user] if user in late else (keys[user][0] - 0.5,) for user in node.users
            )
            candidates = [reader_of.get(user, user) for user in node.users]
            if node in launch_of and launch_of[node] in readers:
                candidates.append(readers[launch_of[node]])
            reader_of[node] = min(candidates, key=keys.__getitem__)
            if node in launch_of:
                readers[launch_of[node]] = reader_of[node]
    return readers


def _settles(node: fx.Node) -> bool:
    if node.target in DIVISIONS_OF_LISTS:
        return True
    return node.target in _SETTLING and len(node.all_input_nodes) == 1


def _queues(nodes: Sequence[fx.Node], groups: DdpGroups) -> list[list[fx.Node]]:
    """The launches of each process group, in graph order. A process group has one queue, and all of
    its ranks must fill the queue in the same order."""
    queues: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if is_launch(node):
            queues.setdefault(groups.queue_of(node), []).append(node)
    return list(queues.values())


def _launched_at(
    queues: Sequence[Sequence[fx.Node]], keys: dict[fx.Node, SortKey]
) -> dict[fx.Node, int]:
    """The index of the node after which each launch runs. A launch never runs before those that
    precede it in its queue."""
    return {
        launch: position
        for queue in queues
        for launch, position in zip(
            queue, accumulate((int(keys[launch][0]) for launch in queue), max), strict=True
        )
    }
