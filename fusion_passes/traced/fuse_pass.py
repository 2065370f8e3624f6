"""The pass that Inductor runs on a backward that compiled autograd has traced, and its report."""

from __future__ import annotations

import functools
import hashlib
from itertools import zip_longest

from torch import fx

from fusion_passes.config import FusionConfig
from fusion_passes.graph.custom_ops import give_own_memory
from fusion_passes.graph.identity import pass_identity
from fusion_passes.graph.text import dtype_name
from fusion_passes.reporting.graphs import compile_log
from fusion_passes.reporting.records import BucketReport, FusionReport, RejectionReport
from fusion_passes.torch_private import CustomGraphPass
from fusion_passes.traced.backwards import traced_modules
from fusion_passes.traced.buckets import BucketPlan, TracedBucket
from fusion_passes.traced.pack import register_lowerings
from fusion_passes.traced.pipeline import run_pipeline
from fusion_passes.traced.place import Placement


class FusePass(CustomGraphPass):
    """Runs the pipeline on a backward that compiled autograd has traced, and records for the report
    what the pipeline did."""

    def __init__(self, config: FusionConfig) -> None:
        self._config = config
        self._modules = traced_modules.identity()

    def __call__(self, graph: fx.Graph) -> None:
        _register_lowerings()
        mode = self._config.reduces_by
        plan = run_pipeline(graph, mode, traced_modules.owner_of, traced_modules.buckets_of)
        give_own_memory(graph)
        if plan.buckets:
            packed = range(len(plan.buckets)) if mode == "concat" else ()
            compile_log.expect(report_plan(plan, self._config.mode), plan.digest(), tuple(packed))

    def uuid(self) -> str:
        return pass_identity(self._config.mode, self._modules)


@functools.cache
def _register_lowerings() -> None:
    """Register the lowerings, not before a compile: Inductor takes a second to import."""
    register_lowerings(compile_log.packed)


def report_plan(plan: BucketPlan, mode: str) -> FusionReport:
    """The report of a plan that was carried out on a graph."""
    reductions = sum(len(bucket.members) for bucket in plan.buckets)
    left_alone = sum(item.owner is None for item in plan.rejections)
    return FusionReport(
        mode=mode,
        collectives_before=reductions + len(plan.rejections),
        collectives_after=len(plan.buckets) + left_alone,
        buckets=tuple(
            _report_bucket(bucket, placement)
            for bucket, placement in zip_longest(plan.buckets, plan.placements)
        ),
        rejections=tuple(
            RejectionReport(f"{item.node.name} ({item.node.target})", item.reason)
            for item in plan.rejections
        ),
        digest=hashlib.sha256(f"{mode} {plan.digest()}".encode()).hexdigest()[:16],
    )


def _report_bucket(bucket: TracedBucket, placement: Placement | None) -> BucketReport:
    owner = bucket.members[0].owner
    return BucketReport(
        module=owner.module,
        group=owner.process_group,
        dtype=dtype_name(bucket.key.dtype),
        num_bytes=bucket.num_bytes,
        sent_bytes=bucket.sent_bytes,
        scaling=bucket.scaling.method,
        parameters=tuple(member.owner.parameter for member in bucket.members),
        waited=placement.why_waited() if placement else "",
        overlapped=placement.overlapped if placement else 0,
        following=placement.following if placement else 0,
    )
