"""The package's entry among Inductor's post-grad passes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.agreement.protocol import agreed_list, agreed_lists
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_forward import ReducedInputs, reduced_inputs
from fusion_passes.ddp.launch_clock import launch_clock
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unfused import warn_without_profile
from fusion_passes.ddp.unused import any_may_lack, beside
from fusion_passes.flag import active_config
from fusion_passes.graph.collectives import (
    decode_all_reduce,
    is_launch,
    is_pinned,
    is_wait,
    pinned_graph,
)
from fusion_passes.graph.operators import is_own
from fusion_passes.graph.sparse import give_own_memory
from fusion_passes.install.conflicts import check_conflicts
from fusion_passes.lowering.pack import register_lowerings
from fusion_passes.passes.pipeline import run_pipeline
from fusion_passes.passes.verify import BrokenInvariantError
from fusion_passes.plan.caps import BucketCaps, bucket_caps
from fusion_passes.plan.planner import NO_PROFILE, nothing_agreed
from fusion_passes.reductions.find import Rejection
from fusion_passes.reductions.insert import insert_reductions, is_aot_backward
from fusion_passes.reductions.unused import send_beside
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.records import report_plan
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import CustomGraphPass, is_compiling_backward
from fusion_passes.torch_private.inductor import (
    calls_operators_by_default,
    donates_buffers,
    hash_files,
    lower_by_inductor,
)
from fusion_passes.version import __version__


class DdpFusionPass(CustomGraphPass):
    """Fuses a post-grad graph as the flag says, and records what was done."""

    def __call__(self, graph: fx.Graph) -> None:
        config = active_config()
        if config is None:
            return
        self._fuse(graph, config)
        give_own_memory(graph)

    def _fuse(self, graph: fx.Graph, config: FusionConfig) -> None:
        _teach_inductor()
        inputs = reduced_inputs()
        in_aot = inputs is not None and is_aot_backward(graph)
        if inputs is not None and in_aot:
            if not _insert_reductions(graph, inputs):
                return
            config = replace(config, scaling="collective")
        if any_may_lack():
            send_beside(graph, functools.partial(beside, in_aot=in_aot), registry.owner_of)
        plan = run_pipeline(
            graph,
            config,
            registry.owner_of,
            functools.partial(caps_of, config),
            nothing_agreed if in_aot else functools.partial(_agreed_in, config.reduces_by),
            is_optional=in_aot,
            profile_of=lambda name: registry.module(name).profile,
            steps_of=lambda name: registry.module(name).steps,
        )
        if in_aot and not all(bucket.scaling.is_by_collective for bucket in plan.buckets):
            raise BrokenInvariantError("a gradient that may stay on its rank is divided on it")
        if plan.buckets:
            check_conflicts()
            if inputs is not None and in_aot:
                names = {bucket.key.group_name for bucket in plan.buckets}
                launch_clock.note_planned(names, inputs, plan.chosen_from)
        if NO_PROFILE in plan.decision:
            owners = [bucket.members[0].owner for bucket in plan.buckets]
            warn_without_profile(owner.module for owner in owners if owner.world_size > 1)
        if plan.buckets or any(map(_is_average, plan.rejections)):
            packed = [i for i, bucket in enumerate(plan.buckets) if not bucket.is_empty]
            journal.expect(
                report_plan(plan, config.mode),
                plan.digest(),
                packed if config.reduces_by == "concat" else (),
            )
        if calls_operators_by_default():
            _lower_collectives(graph)

    def uuid(self) -> str:
        """Identity of what this pass does to a graph: the FX graph cache's key holds it. Another
        version of the package, option, or cap of a DDP module is another identity; so is whether
        buffers are donated, which the key does not hold otherwise."""
        state: list[object] = [__version__, _source_hash(), active_config(), donates_buffers()]
        state.append(registry.fingerprint())
        state.append(reduced_inputs())
        if is_compiling_backward():
            state.append(agreed_lists())
        return hashlib.sha256(repr(state).encode()).hexdigest()


def _insert_reductions(graph: fx.Graph, of: ReducedInputs) -> bool:
    """As :func:`fusion_passes.reductions.insert.insert_reductions`, for these inputs."""
    owner_of, needs_all = registry.owner_of, of.needs_all
    return insert_reductions(graph, of.inputs, of.num_inputs, owner_of, needs_all=needs_all)


def _lower_collectives(graph: fx.Graph) -> None:
    """Inductor keeps the order of the collectives that it lowers, and so the order in which ranks
    meet. In lite mode it calls operators, in any order that their inputs allow."""
    for outer in graph.nodes:
        for node in pinned_graph(outer).nodes if is_pinned(outer) else (outer,):
            if is_launch(node) or is_wait(node) or is_own(node.target):
                lower_by_inductor(node)


def _agreed_in(mode: str, module: str, parameters: Collection[int]) -> LaunchList | None:
    """What the ranks have agreed on for a graph in this mode; late collectives are none, but for a
    communication hook, which is to be given buckets of the same sizes again."""
    agreed = agreed_list(module, parameters)
    is_same = agreed is not None and (agreed.mode == mode or agreed.for_hook)
    return agreed if is_same else None


def _is_average(rejected: Rejection) -> bool:
    """Whether a collective that is not fused reduces a gradient, or looks like it. One of DDP's may
    be gone: it is left to the end of the backward."""
    if rejected.owner is not None:
        return True
    call = decode_all_reduce(rejected.node)
    return call is not None and call.tensor.target is torch.ops.aten.div.Tensor


def caps_of(config: FusionConfig, group_name: str) -> BucketCaps:
    """The caps of the module that owns ``group_name``, under these options."""
    return bucket_caps(config, registry.module(group_name).caps)


@process_state.once("whether Inductor knows the package's operators", Lifetime.PROCESS)
def _teach_inductor() -> None:
    """Once, and not before something is compiled: Inductor takes a second to import."""
    register_lowerings(journal.packed)


@process_state.once("a hash of the package's code", Lifetime.PROCESS)
def _source_hash() -> str:
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hash_files(tuple(str(file) for file in files)).hex()
