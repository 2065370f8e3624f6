"""Converts a plan into its report."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

from fusion_passes.graph.text import dtype_name
from fusion_passes.reporting.records import BucketReport, FusionReport, RejectionReport
from fusion_passes.traced.buckets import BucketPlan, TracedBucket
from fusion_passes.traced.placement import Placement


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
