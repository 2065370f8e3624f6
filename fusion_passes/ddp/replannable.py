"""Which modules can have a second plan within a run, and what their ranks have measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.ddp.comm_hooks import is_hooked
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.priced import cost_ns, sent_bytes
from fusion_passes.ddp.watched import STEPS, PlannedGraph, Watched
from fusion_passes.flag import active_config
from fusion_passes.profile.records import Profile
from fusion_passes.profile.steps import MeasuredSteps, slowest_ready
from fusion_passes.torch_private.compiled_backward import why_not_again


def graph_of(ddp: DistributedDataParallel, item: Watched) -> tuple[PlannedGraph | None, str]:
    """The graph that was measured, if it can have a second plan in this process; else why it
    cannot, for people: what follows "because".

    Args:
        ddp: the module.
        item: what measures its steps.
    """
    why_not = next(filter(None, _obstacles(ddp, item)), "")
    return (None, why_not) if why_not else (item.graphs[0], "")


def _obstacles(ddp: DistributedDataParallel, item: Watched) -> Iterator[str]:
    """Why there cannot be a second plan, reason by reason; empty where one does not hold."""
    module, config, graphs = registry.module_of(ddp), active_config(), item.graphs
    if config is None or config.mode != "auto":
        yield "ddp_fusion is not 'auto' any more"
    if module.steps is not None:
        yield "its buckets were planned from measured steps already"
    if item.participant.usage is not None:
        yield "find_unused_parameters may change what is sent"
    if module.calls_hook or is_hooked(ddp):
        yield "a communication hook may know its buckets"
    if item.forward is None:
        yield item.why_not
    if len(sharing(ddp)) > 1:
        yield "another DDP module may share its compiled forward"
    if len(graphs) != 1:
        yield "it has several backwards" if graphs else "its backward came from a cache"
    if graphs[0].chosen_from is None:
        yield "its buckets are not chosen from its own costs alone"
    yield why_not_again(item.forward)


def sharing(ddp: DistributedDataParallel) -> list[str]:
    """The names of the modules that may share a module's compiled forward, itself among them: the
    gradients of their parameters are alike."""
    kinds = registry.module_of(ddp).kinds
    modules = map(registry.module_of, registry.modules())
    return [module.group_name for module in modules if module.kinds == kinds]


def digest_of(graph: PlannedGraph | None) -> str:
    """Equal where the same steps give the same second plan; empty where there is no graph."""
    known = None if graph is None else graph.chosen_from
    return "" if known is None else known.digest()


def merged_steps(
    ddp: DistributedDataParallel,
    profile: Profile,
    launches: str,
    launched_ns: Sequence[Sequence[int]],
) -> str:
    """What all ranks have measured of a module, as text.

    Args:
        ddp: the module.
        profile: of its ranks.
        launches: what they launch.
        launched_ns: when, by rank.
    """
    collectives = LaunchList.decode(launches).collectives
    costs = [cost_ns(ddp, profile, one) for one in collectives]
    taken = [profile.rates.taken.of_bytes(sent_bytes(ddp, one)) for one in collectives]
    times = slowest_ready(launched_ns, costs, taken)
    return MeasuredSteps(STEPS, tuple(one.parameters for one in collectives), times).to_json()
