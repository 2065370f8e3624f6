"""The order of the passes, on one screen; runs them, and holds each to its contract."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import fx

from fusion_passes.config import ReduceMode
from fusion_passes.graph.text import graph_text
from fusion_passes.passes.coalesced import FuseByCoalescing
from fusion_passes.passes.concat import FuseByConcat
from fusion_passes.passes.contract import GraphPass
from fusion_passes.passes.erase import EraseDeadCode
from fusion_passes.passes.pin import PinOrder
from fusion_passes.passes.place import PlaceReductions
from fusion_passes.passes.verify import BrokenInvariantError, graph_facts, verify
from fusion_passes.plan.buckets import BucketPlan
from fusion_passes.plan.placement import Placement, PlacementPlan, plan_placement
from fusion_passes.plan.planner import BucketsOf, CannotLaunchError, plan_buckets
from fusion_passes.reductions.find import find_gradient_reductions
from fusion_passes.reductions.owners import DdpGroups, OwnerOf
from fusion_passes.torch_private.inductor import run_observed, trace_artifact

log = logging.getLogger(__name__)

PASS_NAMES: Final = tuple(
    graph_pass.__name__
    for graph_pass in (EraseDeadCode, FuseByConcat, FuseByCoalescing, PlaceReductions, PinOrder)
)
"""By which torch counts their time."""


def passes_before_planning(groups: DdpGroups) -> list[GraphPass]:
    """The passes that prepare a graph for the plan, in order."""
    return [EraseDeadCode(groups)]  # What nothing reads would pass for a reader of a gradient.


def passes_that_fuse(mode: ReduceMode, plan: BucketPlan) -> list[GraphPass]:
    """The pass that makes the launches of ``plan``."""
    foreign = tuple(rejection.node for rejection in plan.rejections)
    if mode == "concat":
        return [FuseByConcat(plan.buckets, foreign, plan.digest())]
    return [FuseByCoalescing(plan.buckets, foreign)]


def passes_that_order(placement: PlacementPlan, groups: DdpGroups) -> list[GraphPass]:
    """The passes that put the launches of a plan into an order and keep it, in order."""
    return [
        PlaceReductions(placement),  # Needs the final launches; moves, but adds nothing.
        PinOrder(groups),  # Last: it binds the order that it finds.
    ]


def run_pipeline(
    graph: fx.Graph, mode: ReduceMode, owner_of: OwnerOf, buckets_of: BucketsOf
) -> BucketPlan:
    """Fuse the gradient reductions of a traced backward.

    Args:
        graph: a post-grad graph; changed in place.
        mode: how buckets are reduced.
        owner_of: says which collectives are DDP's.
        buckets_of: what each DDP module launches.

    Returns:
        The plan that was carried out; without buckets where the graph has no reduction of DDP.

    Raises:
        CannotLaunchError: the graph cannot launch what its modules launch.
        BrokenInvariantError: a bug of a pass.
    """
    with _collector_paused():
        groups = DdpGroups.of(graph, owner_of)
        if not groups.owners:
            return BucketPlan((), find_gradient_reductions(graph, groups).rejections)
        runner = _Runner(graph, groups)
        runner.run(passes_before_planning(groups))
        plan = plan_buckets(graph, find_gradient_reductions(graph, groups), buckets_of)
        if not plan.buckets:
            return plan
        if not runner.run(passes_that_fuse(mode, plan)):
            raise CannotLaunchError("the pass that fuses them is switched off")
        runner.run(passes_that_order(plan_placement(graph, groups), groups))
        log.info("plan %s:\n%s", plan.digest(), plan.describe())
        trace_artifact("ddp_fusion_plan", plan.describe)
        return plan.with_placements(runner.placements)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """The passes make many objects and no cycles of them: without this, a third of the time on a
    graph of 10,000 gradients goes into looking for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Runner:
    """Runs passes over one graph, and holds each to its contract.

    Attributes:
        placements: where the passes have placed DDP's collectives, by group name.
    """

    def __init__(self, graph: fx.Graph, groups: DdpGroups) -> None:
        assert graph.owning_module is not None, "a post-grad graph belongs to a module"
        self.placements: Mapping[str, Sequence[Placement]] = {}
        self._graph = graph
        self._module = graph.owning_module
        self._groups = groups
        self._facts = graph_facts(graph, groups)
        self._number = 0
        self._trace("traced")

    def run(self, passes: Sequence[GraphPass]) -> bool:
        """Run passes, in order.

        Returns:
            Whether the passes ran; not so where one that others need is switched off.

        Raises:
            BrokenInvariantError: a pass has broken an invariant, or said what is not so.
        """
        for graph_pass in passes:
            name, before = graph_pass.name, _structure(self._graph)
            changed = self._run(graph_pass)
            if changed is None:
                log.info("%s is switched off by TORCHINDUCTOR_DISABLED_PASSES", name)
                if graph_pass.others_need_it:
                    return False
                continue
            if changed != (_structure(self._graph) != before):
                raise BrokenInvariantError(f"{name} returned {changed}, which is not what it did")
            if changed:
                expected = graph_pass.facts_after(self._facts)
                self._facts = verify(self._graph, expected, self._groups)
            self.placements = graph_pass.placements() or self.placements
            self._trace(name)
            log.debug("%s: %s", name, "changed the graph" if changed else "nothing to do")
        return True

    def _run(self, graph_pass: GraphPass) -> bool | None:
        """Whether the pass has changed the graph; ``None`` if it is switched off."""
        changed: bool | None = run_observed(self._module, graph_pass.name, graph_pass)
        return changed

    def _trace(self, name: str) -> None:
        """The graph after a pass, for ``tlparse``: what is before it is after the one before."""
        graph = self._graph
        trace_artifact(f"ddp_fusion_{self._number}_{name}", lambda: graph_text(graph))
        self._number += 1


def _structure(graph: fx.Graph) -> list[tuple[object, ...]]:
    """What two graphs have in common if nothing was changed: cheaper than their texts."""
    return [(node, node.name, node.target, node.args, node.kwargs) for node in graph.nodes]
