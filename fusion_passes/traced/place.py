"""Moves launches to early places and waits to late ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusion_passes.traced.dependencies import reorder
from fusion_passes.traced.placement import PlacementPlan
from fusion_passes.traced.verify import GraphPass


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
    one process group, DDP's and others, keep their order. Other nodes move only to make room.

    Attributes:
        plan: order for the nodes of the graph.
    """

    plan: PlacementPlan

    def __call__(self, graph: fx.Graph) -> bool:
        return bool(self.plan.placements) and reorder(graph, self.plan.keys, self.plan.queues)
