"""Gives the compile of a traced backward a pass of its own, which fuses its gradient reductions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx

from fusion_passes.config import FusionConfig
from fusion_passes.ddp.traced import traced_modules
from fusion_passes.graph.operators import give_own_memory
from fusion_passes.install.pass_slot import SLOT, pass_list, pass_value
from fusion_passes.lowering.pack import register_lowerings
from fusion_passes.passes.pipeline import run_pipeline
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.records import report_plan
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import CustomGraphPass, inductor_config
from fusion_passes.torch_private.inductor import donates_buffers, hash_files
from fusion_passes.version import __version__


class FusePass(CustomGraphPass):
    """Runs the pipeline among Inductor's post-grad passes, and records what was done.

    Args:
        config: the options.
    """

    def __init__(self, config: FusionConfig) -> None:
        self._config = config
        self._modules = traced_modules.identity()

    def __call__(self, graph: fx.Graph) -> None:
        _teach_inductor()
        mode = self._config.reduces_by
        plan = run_pipeline(graph, mode, traced_modules.owner_of, traced_modules.buckets_of)
        give_own_memory(graph)
        if plan.buckets:
            packed = range(len(plan.buckets)) if mode == "concat" else ()
            journal.expect(report_plan(plan, self._config.mode), plan.digest(), tuple(packed))

    def uuid(self) -> str:
        """Identity of what this pass does to a graph: the FX graph cache's key holds it. Another
        version of the package, option, or layout of a module is another identity; so is whether
        buffers are donated, which the key does not hold otherwise."""
        state = [__version__, source_hash(), self._config, donates_buffers(), self._modules]
        return hashlib.sha256(repr(state).encode()).hexdigest()


def options_to_fuse(config: FusionConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """What options of Inductor have the graph of a traced backward fused.

    Args:
        config: the package's options.
        options: of this compile, so far.
    """
    passes = pass_list(options.get(SLOT, getattr(inductor_config, SLOT)))
    return {SLOT: pass_value([*passes, FusePass(config)])}


@process_state.once("whether Inductor knows the package's operators", Lifetime.PROCESS)
def _teach_inductor() -> None:
    """Once, and not before something is compiled: Inductor takes a second to import."""
    register_lowerings(journal.packed)


@process_state.once("a hash of the package's code", Lifetime.PROCESS)
def source_hash() -> str:
    """Equal for the same code of the package."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hash_files(tuple(str(file) for file in files)).hex()
