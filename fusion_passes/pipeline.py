"""The order of the passes, on one screen; runs them, checks them, and says what they did."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import fx

from fusion_passes.config import FusionConfig, ReduceDtype
from fusion_passes.graph_edit import erase_dead
from fusion_passes.passes.agree import AgreeBeforeLaunch
from fusion_passes.passes.coalesced import FuseByCoalescing
from fusion_passes.passes.concat import FuseByConcat
from fusion_passes.passes.hold import HoldPlacement
from fusion_passes.passes.place import PlaceReductions
from fusion_passes.passes.write import WriteGradsTogether
from fusion_passes.planning import BucketPlan, CapsOf, PlanOptions, plan_buckets
from fusion_passes.reductions import OwnerOf, find_gradient_reductions
from fusion_passes.torch_private.inductor import graph_observer
from fusion_passes.verify import LawBrokenError, graph_facts, verify, with_plan

log = logging.getLogger(__name__)

_DTYPES: Final[Mapping[ReduceDtype | None, torch.dtype | None]] = {
    None: None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

Pass = Callable[[fx.Graph], bool]


def passes_for(config: FusionConfig, plan: BucketPlan, owner_of: OwnerOf) -> list[Pass]:
    """The passes that carry out ``plan``, in order."""
    foreign = tuple(rejection.node for rejection in plan.rejections)
    fuse: Pass = (
        FuseByConcat(plan.buckets, foreign, plan.digest())
        if config.mode == "concat"
        else FuseByCoalescing(plan.buckets, foreign)
    )
    agree = AgreeBeforeLaunch(tuple(plan.collectives(config.mode).items()), owner_of)
    return [
        fuse,  # First: what is placed are the fused launches and waits.
        WriteGradsTogether(owner_of),  # Of what fusing has left; before it is placed.
        PlaceReductions(owner_of),  # Needs the final launches; moves, but adds nothing.
        agree,  # In front of what is the first launch then.
        HoldPlacement(owner_of),  # Last: it binds the order that it finds.
    ]


def run_pipeline(
    graph: fx.Graph, config: FusionConfig, owner_of: OwnerOf, caps_of: CapsOf
) -> BucketPlan:
    """Fuses the gradient reductions of a graph.

    Args:
        graph: a post-grad graph; changed in place.
        config: the options; caps are not read from it (``caps_of`` gives them).
        owner_of: says which collectives are DDP's.
        caps_of: the caps of each DDP module.

    Returns:
        The plan that was carried out; without buckets where the graph has no reduction of DDP.

    Raises:
        LawBrokenError: a bug of a pass.
    """
    with _collector_paused():
        return _fuse(graph, config, owner_of, caps_of)


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


def _fuse(graph: fx.Graph, config: FusionConfig, owner_of: OwnerOf, caps_of: CapsOf) -> BucketPlan:
    found = find_gradient_reductions(graph, owner_of)
    if not found.reductions:
        return BucketPlan((), found.rejections)
    erase_dead(graph)
    found = find_gradient_reductions(graph, owner_of)
    options = PlanOptions(config.scaling, _DTYPES[config.reduce_dtype])
    plan = plan_buckets(graph, found.reductions, caps_of, found.rejections, options)
    module = graph.owning_module
    assert module is not None, "a post-grad graph belongs to a module"
    facts = graph_facts(graph, owner_of)
    for rewrite in passes_for(config, plan, owner_of):
        name = type(rewrite).__name__
        shape = _structure(graph)
        with graph_observer(module, name):
            changed = rewrite(graph)
        if changed != (_structure(graph) != shape):
            raise LawBrokenError(f"{name} returned {changed}, which is not what it did")
        if isinstance(rewrite, FuseByConcat | FuseByCoalescing):
            facts = with_plan(facts, plan)
        facts = verify(graph, facts, owner_of)
        log.debug("%s: %s", name, "changed the graph" if changed else "nothing to do")
    log.info("plan %s:\n%s", plan.digest(), plan.describe())
    return plan


def _structure(graph: fx.Graph) -> list[tuple[object, ...]]:
    """What two graphs have in common if nothing was changed: cheaper than their texts."""
    return [(node, node.name, node.target, node.args, node.kwargs) for node in graph.nodes]
