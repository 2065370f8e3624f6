"""Places launches early and waits late."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusion_passes.traced.dependencies import reorder
from fusion_passes.traced.placement import PlacementPlan
from fusion_passes.traced.verify import GraphPass


@dataclass(frozen=True)
class PlaceReductions(GraphPass):
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
        plan: an order for the nodes of the graph.
    """

    plan: PlacementPlan

    def __call__(self, graph: fx.Graph) -> bool:
        return bool(self.plan.placements) and reorder(graph, self.plan.keys, self.plan.queues)
