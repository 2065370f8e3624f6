"""The order of the passes, on one screen: runs them and checks each one against its contract."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import fx

from fusion_passes.config import ReduceMode
from fusion_passes.graph.text import graph_text
from fusion_passes.torch_private.inductor import run_observed, trace_artifact
from fusion_passes.traced.buckets import BucketPlan, BucketsOf, CannotLaunchError, plan_buckets
from fusion_passes.traced.coalesced import FuseByCoalescing
from fusion_passes.traced.concat import FuseByConcat
from fusion_passes.traced.erase import EraseDeadCode
from fusion_passes.traced.find import find_gradient_reductions
from fusion_passes.traced.owners import DdpGroups, OwnerOf
from fusion_passes.traced.pin import PinOrder
from fusion_passes.traced.place import PlaceReductions, placements_of
from fusion_passes.traced.verify import BrokenInvariantError, GraphPass, graph_facts, verify

log = logging.getLogger(__name__)


def run_pipeline(
    graph: fx.Graph, mode: ReduceMode, owner_of: OwnerOf, buckets_of: BucketsOf
) -> BucketPlan:
    """Fuse the gradient reductions of a traced backward, in its post-grad graph. ``owner_of`` says
    which collectives are DDP's.

    Returns:
        The plan that was carried out. It has no buckets if the graph has no gradient reduction of
        DDP.

    Raises:
        CannotLaunchError: the graph cannot launch the buckets that its modules launch.
        BrokenInvariantError: a pass has a bug.
    """
    groups = DdpGroups.of(graph, owner_of)
    if not groups.owners:
        return BucketPlan((), find_gradient_reductions(graph, groups).rejections)
    runner = _Runner(graph, groups)
    # A dead node would count as a reader of a gradient.
    runner.run(EraseDeadCode())
    plan = plan_buckets(graph, find_gradient_reductions(graph, groups), buckets_of)
    if not plan.buckets:
        return plan
    concat = FuseByConcat(plan.buckets, plan.digest())
    if not runner.run(concat if mode == "concat" else FuseByCoalescing(plan.buckets)):
        raise CannotLaunchError("TORCHINDUCTOR_DISABLED_PASSES switches off the pass that fuses")
    launches = groups.launches_in(graph)  # One for each bucket of the plan, in its order.
    is_placed = runner.run(PlaceReductions(groups))  # Moves nodes, adds none.
    placements = placements_of(graph, launches) if is_placed else ()
    runner.run(PinOrder(groups))  # Last: it pins the order that it finds.
    log.info("plan %s:\n%s", plan.digest(), plan.describe())
    return replace(plan, placements=placements)


class _Runner:
    """Runs passes over one graph and checks each one against its contract."""

    def __init__(self, graph: fx.Graph, groups: DdpGroups) -> None:
        assert graph.owning_module is not None, "a post-grad graph belongs to a module"
        self._graph = graph
        self._module = graph.owning_module
        self._groups = groups
        self._facts = graph_facts(graph, groups)
        self._number = 0
        self._trace("traced")

    def run(self, graph_pass: GraphPass) -> bool:
        """Run a pass.

        Returns:
            Whether the pass ran; False if it is switched off.

        Raises:
            BrokenInvariantError: the pass broke an invariant, or returned a wrong changed flag.
        """
        name, before = type(graph_pass).__name__, _structure(self._graph)
        changed: bool | None = run_observed(self._module, name, graph_pass)
        if changed is None:
            log.info("%s is switched off by TORCHINDUCTOR_DISABLED_PASSES", name)
            return False
        if changed != (_structure(self._graph) != before):
            raise BrokenInvariantError(f"{name} returned {changed}, which is not what it did")
        if changed:
            expected = graph_pass.facts_after(self._facts)
            self._facts = verify(self._graph, expected, self._groups)
        self._trace(name)
        log.debug("%s: %s", name, "changed the graph" if changed else "nothing to do")
        return True

    def _trace(self, name: str) -> None:
        """Write the graph after a pass for ``tlparse``; the one before is in the previous trace."""
        graph = self._graph
        trace_artifact(f"ddp_fusion_{self._number}_{name}", lambda: graph_text(graph))
        self._number += 1


def _structure(graph: fx.Graph) -> list[tuple[object, ...]]:
    """A value that stays equal as long as the graph does not change; cheaper than the graph's
    text."""
    return [(node, node.name, node.target, node.args, node.kwargs) for node in graph.nodes]
