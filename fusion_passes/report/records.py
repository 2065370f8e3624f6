"""What was done to a graph, as plain values that can be printed, compared and stored."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from fusion_passes.planning import BucketPlan


@dataclass(frozen=True)
class BucketReport:
    """One collective that a step launches for DDP.

    Attributes:
        module: the DDP module, by number of construction on its group and by class.
        group: name of the process group.
        dtype: of the gradients, as in torch.
        num_bytes: what is sent.
        cap_bytes: the cap under which the bucket was filled.
        parameters: names of the parameters whose gradients it holds, in ready order.
    """

    module: str
    group: str
    dtype: str
    num_bytes: int
    cap_bytes: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class RejectionReport:
    """A collective that was left as it is, and why."""

    collective: str
    reason: str


@dataclass(frozen=True)
class FusionReport:
    """What was done to one compiled graph.

    Attributes:
        mode: how buckets are reduced.
        collectives_before: launches in the graph as it was traced, others than DDP's included.
        collectives_after: launches in the graph as it runs.
        buckets: in the order of their launches.
        rejections: the launches that are not DDP's, in graph order.
        digest: equal for equal plans, on every rank.
        from_cache: whether this process took the compiled graph from the FX graph cache.
    """

    mode: str
    collectives_before: int
    collectives_after: int
    buckets: tuple[BucketReport, ...]
    rejections: tuple[RejectionReport, ...]
    digest: str
    from_cache: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, from_cache=False)), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> FusionReport:
        """The report that ``to_json`` wrote, marked as read from a cache."""
        data: dict[str, Any] = json.loads(text)
        buckets = tuple(
            BucketReport(**{**bucket, "parameters": tuple(bucket["parameters"])})
            for bucket in data.pop("buckets")
        )
        rejections = tuple(RejectionReport(**item) for item in data.pop("rejections"))
        data["from_cache"] = True
        return FusionReport(buckets=buckets, rejections=rejections, **data)


def report_plan(plan: BucketPlan, mode: str) -> FusionReport:
    """The report of a plan that was carried out."""
    reductions = sum(len(bucket.members) for bucket in plan.buckets)
    unfused = sum(len(bucket.members) for bucket in plan.buckets if not bucket.is_fused)
    left_alone = len(plan.rejections)
    return FusionReport(
        mode=mode,
        collectives_before=reductions + left_alone,
        collectives_after=len(plan.fused) + unfused + left_alone,
        buckets=tuple(
            BucketReport(
                module=bucket.members[0].owner.module,
                group=bucket.members[0].owner.process_group,
                dtype=str(bucket.key.dtype).removeprefix("torch."),
                num_bytes=bucket.num_bytes,
                cap_bytes=bucket.cap_bytes,
                parameters=tuple(member.owner.parameter for member in bucket.members),
            )
            for bucket in plan.buckets
        ),
        rejections=tuple(
            RejectionReport(f"{item.node.name} ({item.node.target})", item.reason)
            for item in plan.rejections
        ),
        digest=hashlib.sha256(f"{mode} {plan.digest()}".encode()).hexdigest()[:16],
    )
