"""The order of the passes, on one screen; runs them, and holds each to its contract."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import fx

from fusion_passes.config import FusionConfig
from fusion_passes.graph.text import graph_text
from fusion_passes.passes.agree import AgreeBeforeLaunch
from fusion_passes.passes.coalesced import FuseByCoalescing
from fusion_passes.passes.concat import FuseByConcat
from fusion_passes.passes.contract import GraphPass
from fusion_passes.passes.erase import EraseDeadCode
from fusion_passes.passes.later import ReduceLater
from fusion_passes.passes.pin import PinOrder
from fusion_passes.passes.place import PlaceReductions
from fusion_passes.passes.verify import BrokenInvariantError, graph_facts, verify
from fusion_passes.passes.write import WriteGradsTogether
from fusion_passes.plan.buckets import BucketPlan
from fusion_passes.plan.corrected import StepsOf, no_steps
from fusion_passes.plan.placement import Placement, PlacementPlan, plan_placement
from fusion_passes.plan.planner import (
    AgreedOf,
    CapsOf,
    PlanOptions,
    ProfileOf,
    no_profile,
    nothing_agreed,
    plan_buckets,
)
from fusion_passes.plan.scaling import REDUCE_DTYPE_OF
from fusion_passes.reductions.find import find_gradient_reductions
from fusion_passes.reductions.owners import DdpGroups, OwnerOf
from fusion_passes.torch_private.inductor import is_pass_disabled, run_observed, trace_artifact

log = logging.getLogger(__name__)

PASS_NAMES: Final = tuple(
    graph_pass.__name__
    for graph_pass in (
        EraseDeadCode,
        FuseByConcat,
        FuseByCoalescing,
        WriteGradsTogether,
        PlaceReductions,
        AgreeBeforeLaunch,
        ReduceLater,
        PinOrder,
    )
)
"""By which torch counts their time."""


def passes_before_planning(groups: DdpGroups) -> list[GraphPass]:
    """The passes that prepare a graph for the plan, in order."""
    return [EraseDeadCode(groups)]  # What nothing reads would pass for a reader of a gradient.


def passes_that_fuse(config: FusionConfig, plan: BucketPlan, groups: DdpGroups) -> list[GraphPass]:
    """The passes that make the launches of ``plan``, in order."""
    foreign = tuple(rejection.node for rejection in plan.rejections)
    fuse: GraphPass = (
        FuseByConcat(plan.buckets, foreign, plan.digest())
        if config.reduces_by == "concat"
        else FuseByCoalescing(plan.buckets, foreign)
    )
    return [
        fuse,  # First: what is placed are the fused launches and waits.
        WriteGradsTogether(groups),  # Of what fusing has left; before it is placed.
    ]


def passes_that_order(
    config: FusionConfig,
    plan: BucketPlan,
    placement: PlacementPlan,
    groups: DdpGroups,
    *,
    is_optional: bool = False,
) -> list[GraphPass]:
    """The passes that put the launches of ``plan`` into an order and keep it, in order; for
    ``is_optional``, see :class:`fusion_passes.passes.agree.AgreeBeforeLaunch`."""
    launches = plan.launch_lists(config.reduces_by, placement)
    texts = tuple((name, items.encode()) for name, items in launches.items())
    return [
        PlaceReductions(placement),  # Needs the final launches; moves, but adds nothing.
        AgreeBeforeLaunch(texts, groups, is_optional),  # Before what is the first launch then.
        ReduceLater.of(plan.rejections),  # Their ranks have said so before what was the first.
        PinOrder(groups),  # Last: it binds the order that it finds.
    ]


def run_pipeline(
    graph: fx.Graph,
    config: FusionConfig,
    owner_of: OwnerOf,
    caps_of: CapsOf,
    agreed_of: AgreedOf = nothing_agreed,
    *,
    is_optional: bool = False,
    profile_of: ProfileOf = no_profile,
    steps_of: StepsOf = no_steps,
) -> BucketPlan:
    """Fuse the gradient reductions of a graph.

    Args:
        graph: a post-grad graph; changed in place.
        config: the options; caps are not read from it (``caps_of`` gives them).
        owner_of: says which collectives are DDP's.
        caps_of: the caps of each DDP module.
        agreed_of: what the ranks have agreed on.
        is_optional: whether the graph also runs in backwards that are not averaged.
        profile_of: what collectives of each DDP module cost, for the mode ``"auto"``.
        steps_of: when gradients of each were ready in steps, for the same mode.

    Returns:
        The plan that was carried out; without buckets where the graph has no reduction of DDP.

    Raises:
        BrokenInvariantError: a bug of a pass.
    """
    with _collector_paused():
        options = PlanOptions(
            config.scaling,
            REDUCE_DTYPE_OF[config.reduce_dtype],
            profile_of if config.mode == "auto" else None,
            steps_of,
        )
        return _fuse(graph, config, owner_of, caps_of, agreed_of, is_optional, options)


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


def _fuse(
    graph: fx.Graph,
    config: FusionConfig,
    owner_of: OwnerOf,
    caps_of: CapsOf,
    agreed_of: AgreedOf,
    is_optional: bool,
    options: PlanOptions,
) -> BucketPlan:
    groups = DdpGroups.of(graph, owner_of)
    if not groups.owners:
        return BucketPlan((), find_gradient_reductions(graph, groups).rejections)
    runner = _Runner(graph, groups)
    runner.run(passes_before_planning(groups))
    found = find_gradient_reductions(graph, groups)
    if not found.reductions and all(item.owner is None for item in found.rejections):
        return BucketPlan((), found.rejections)
    plan = plan_buckets(graph, found.reductions, caps_of, found.rejections, options, agreed_of)
    if not runner.run(passes_that_fuse(config, plan, groups)):
        return BucketPlan((), found.rejections)
    placement = plan_placement(graph, groups)
    runner.run(passes_that_order(config, plan, placement, groups, is_optional=is_optional))
    log.info("plan %s:\n%s", plan.digest(), plan.describe())
    trace_artifact("ddp_fusion_plan", plan.describe)
    return plan.with_placements(runner.placements)


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
        name, why_always = graph_pass.name, graph_pass.why_always
        if why_always and is_pass_disabled(name):
            log.warning(
                "%s runs, though TORCHINDUCTOR_DISABLED_PASSES names it: %s.", name, why_always
            )
        changed: bool | None = run_observed(
            self._module, name, graph_pass, can_be_disabled=not why_always
        )
        return changed

    def _trace(self, name: str) -> None:
        """The graph after a pass, for ``tlparse``: what is before it is after the one before."""
        graph = self._graph
        trace_artifact(f"ddp_fusion_{self._number}_{name}", lambda: graph_text(graph))
        self._number += 1


def _structure(graph: fx.Graph) -> list[tuple[object, ...]]:
    """What two graphs have in common if nothing was changed: cheaper than their texts."""
    return [(node, node.name, node.target, node.args, node.kwargs) for node in graph.nodes]
