"""The package's entry among Inductor's post-grad passes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
from torch import fx

from fusion_passes.caps import MIB, BucketCaps
from fusion_passes.collectives import decode_all_reduce
from fusion_passes.config import HOLD_CAPS, FusionConfig
from fusion_passes.ddp.modules import registry
from fusion_passes.flag import active_config
from fusion_passes.lowering.pack import register_lowerings
from fusion_passes.pipeline import run_pipeline
from fusion_passes.report.journal import journal
from fusion_passes.report.records import report_plan
from fusion_passes.torch_private import CustomGraphPass, inductor_config
from fusion_passes.torch_private.inductor import hash_files
from fusion_passes.version import __version__


class DdpFusionPass(CustomGraphPass):
    """Fuses a post-grad graph as the flag says, and records what was done."""

    def __call__(self, graph: fx.Graph) -> None:
        config = active_config()
        if config is None:
            return
        _teach_inductor()
        plan = run_pipeline(graph, config, registry.owner_of, functools.partial(caps_of, config))
        if plan.buckets:
            check_conflicts()
        if plan.buckets or any(_is_average(rejection.node) for rejection in plan.rejections):
            packed = [i for i, bucket in enumerate(plan.buckets) if not bucket.is_empty]
            journal.expect(
                report_plan(plan, config.mode),
                plan.digest(),
                packed if config.mode == "concat" else (),
            )

    def uuid(self) -> str:
        """Identity of what this pass does to a graph: the FX graph cache's key holds it. Another
        version of the package, option, or cap of a DDP module is another identity."""
        state = (__version__, _source_hash(), active_config(), registry.fingerprint())
        return hashlib.sha256(repr(state).encode()).hexdigest()


def _is_average(launch: fx.Node) -> bool:
    """Whether a collective that is not DDP's looks like a gradient reduction all the same."""
    call = decode_all_reduce(launch)
    return call is not None and call.tensor.target is torch.ops.aten.div.Tensor


def caps_of(config: FusionConfig, group_name: str) -> BucketCaps:
    """Caps of the module that owns ``group_name``: the user's option, else the module's own."""
    module = registry.module(group_name)
    cap_bytes, first_bytes = module.bucket_cap_bytes, module.first_bucket_cap_bytes
    listed_bytes = module.listed_cap_bytes
    if config.bucket_cap_mb is not None:
        cap_bytes = first_bytes = int(config.bucket_cap_mb * MIB)
        listed_bytes = ()
    if config.first_bucket_cap_mb is not None:
        first_bytes = int(config.first_bucket_cap_mb * MIB)
        listed_bytes = (first_bytes, *(listed_bytes[1:] or (cap_bytes,))) if listed_bytes else ()
    hold_bytes = HOLD_CAPS * max((first_bytes, cap_bytes, *listed_bytes))
    if config.max_hold_mb is not None:
        hold_bytes = int(config.max_hold_mb * MIB)
    return BucketCaps(first_bytes, cap_bytes, hold_bytes, listed_bytes)


def check_conflicts() -> None:
    """Refuses settings of torch that would undo or repeat what the passes do.

    Raises:
        ValueError: it names the setting, its value and the remedy.
    """
    overlap = inductor_config.aten_distributed_optimizations
    settings = {
        "bucket_all_reduces_fx": (inductor_config.bucket_all_reduces_fx, "none"),
        "aten_distributed_optimizations.enable_overlap_scheduling": (
            overlap.enable_overlap_scheduling,
            False,
        ),
        "_fuse_ddp_communication": (inductor_config._fuse_ddp_communication, False),
    }
    for name, (value, needed) in settings.items():
        if value != needed:
            raise ValueError(
                f"torch._inductor.config.{name} = {value!r} cannot be combined with ddp_fusion: "
                "both would fuse and place the same gradient all-reduces. Set it to "
                f"{needed!r}, or set ddp_fusion = None."
            )


@functools.cache
def _teach_inductor() -> None:
    """Once, and not before something is compiled: Inductor takes a second to import."""
    register_lowerings(journal.packed)


@functools.cache
def _source_hash() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hash_files(tuple(str(file) for file in files)).hex()
