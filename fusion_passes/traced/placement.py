"""Decides where DDP's collectives are launched and waited for. Pure: moves nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import is_launch, is_wait
from fusion_passes.graph.families import (
    CASTS,
    DIVISIONS,
    DIVISIONS_OF_LISTS,
    ITEMS,
    RELAYOUTS,
    VIEWS,
    is_library_kernel,
)
from fusion_passes.graph.operators import PACK, WIDEN
from fusion_passes.traced.dependencies import SortKey
from fusion_passes.traced.owners import DdpGroups

# What stands between a gradient and its launch, and costs less than a launch that is late, whatever
# it does to the elements: what works on one gradient, and what works on all of a bucket.
_PACKING: Final = VIEWS | RELAYOUTS | CASTS | DIVISIONS
_PACKING_ALL: Final = DIVISIONS_OF_LISTS | {PACK}
# What brings a result into its place, shape, layout and dtype, and is no reason to wait for it.
_SETTLING: Final = VIEWS | CASTS | DIVISIONS | ITEMS | {WIDEN}


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one of DDP's collectives is waited for, and why.

    Library kernels are matrix products, convolutions and attention: what a collective can hide
    behind.

    Attributes:
        launch: the collective.
        reader: the first node that reads a result; ``None`` if nothing waits for it.
        overlapped: library kernels between launch and wait.
        following: library kernels after the launch.
    """

    launch: fx.Node
    reader: fx.Node | None
    overlapped: int
    following: int

    def why_waited(self) -> str:
        """Where it is waited for, for people; empty if nowhere."""
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
        keys: where each node should stand.
        queues: launches that must keep the order in which they are listed, by process group.
        placements: of DDP's collectives, in the order in which the graph had them.
    """

    keys: dict[fx.Node, SortKey]
    queues: Sequence[Sequence[fx.Node]]
    placements: tuple[Placement, ...]


def plan_placement(graph: fx.Graph, groups: DdpGroups) -> PlacementPlan:
    """Launch each of DDP's collectives right after the last of what it sends exists, and wait
    for it right before the first node that reads a result.

    What is said of each launch holds in the order that the plan gives: library kernels, the nodes
    that launches follow, and those that read results keep their order among each other. The graph
    has its final launches.
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
    """Keys for a launch and what packs its bucket: right after the last gradient."""
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
    # A quotient of two tensors is a gradient, one by a number is scaled.
    return node.target in _PACKING_ALL or (
        node.target in _PACKING and len(node.all_input_nodes) == 1
    )


def _wait_late(
    nodes: Sequence[fx.Node], launches: set[fx.Node], keys: dict[fx.Node, SortKey]
) -> dict[fx.Node, fx.Node]:
    """Keys for the waits for ``launches``, and for what settles their results: right before the
    first use by anything else.

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
    """The launches of each process group in their order: a group has one queue, and its ranks must
    fill it alike."""
    queues: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if is_launch(node):
            queues.setdefault(groups.queue_of(node), []).append(node)
    return list(queues.values())


def _launched_at(
    queues: Sequence[Sequence[fx.Node]], keys: dict[fx.Node, SortKey]
) -> dict[fx.Node, int]:
    """After which node of the graph each launch runs, those before it in its queue counted."""
    return {
        launch: position
        for queue in queues
        for launch, position in zip(
            queue, accumulate((int(keys[launch][0]) for launch in queue), max), strict=True
        )
    }
