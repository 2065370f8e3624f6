"""Moves launches to early places and waits to late ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import issue_order
from fusion_passes.graph.custom_ops import PACK
from fusion_passes.graph.families import CASTS, DIVISIONS, DIVISIONS_OF_LISTS, RELAYOUTS, VIEWS
from fusion_passes.traced.dependencies import SortKey, reorder
from fusion_passes.traced.owners import DdpGroups
from fusion_passes.traced.placement import settled_results
from fusion_passes.traced.verify import GraphPass

# Operators that may stand between a gradient and its launch. They cost less than a late launch,
# whatever they do to the elements. The first set works on one gradient, the second on a bucket.
_PACKING: Final = VIEWS | RELAYOUTS | CASTS | DIVISIONS
_PACKING_ALL: Final = DIVISIONS_OF_LISTS | {PACK}


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
        late = settled_results(nodes, launches)
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
