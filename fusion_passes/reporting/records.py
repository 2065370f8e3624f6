"""What was done to a graph, as plain values that can be printed, compared and stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from fusion_passes.plan.buckets import Bucket, BucketPlan
from fusion_passes.plan.placement import Placement
from fusion_passes.reductions.find import dtype_name
from fusion_passes.reporting.timeline import BucketTimes


@dataclass(frozen=True)
class BucketReport:
    """One bucket: what a step launches for DDP by one collective.

    Attributes:
        module: the DDP module, by number of construction on its group and by class.
        group: name of the process group.
        dtype: of the gradients, as in torch.
        num_bytes: size of the gradients.
        sent_bytes: what is sent: less than ``num_bytes`` in a smaller dtype. Of sparse gradients
            both are those of all rows.
        cap_bytes: the cap under which the bucket was filled; 0 if there was none, and of a traced
            graph, which has the buckets of its module.
        scaling: how its gradients are scaled: :data:`fusion_passes.plan.scaling.ScalingMethod`, or
            ``"hook"`` by a communication hook, or ``"rows"`` for sparse ones, of which each rank
            divides its rows.
        parameters: names of the parameters whose gradients it holds, in the order in which they
            lie.
        copied: for each gradient that is copied into the bucket, instead of stored there by the
            kernel that produces it: the parameter's name, and why. Of a module's bucket that is
            so for the last step.
        note: what the backend does with the bucket that nobody would expect; may be empty.
        launched: where in a traced graph its collective is launched; empty for a module's bucket,
            which is launched when it is full and all before it are. Likewise the next three.
        waited: where in the graph the result is waited for, and why there.
        overlapped: library kernels (matrix products, convolutions, attention) that run between
            launch and wait.
        following: library kernels that follow the launch: where more than ``overlapped``,
            something in the graph reads the result before the end.
        predicted_start_s: when ``"auto"`` expects the network to begin with it, in seconds from the
            start of the backward; ``None`` in other modes.
        predicted_end_s: when it expects the network to be done with it; likewise.
    """

    module: str
    group: str
    dtype: str
    num_bytes: int
    sent_bytes: int
    cap_bytes: int
    scaling: str
    parameters: tuple[str, ...]
    copied: tuple[tuple[str, str], ...] = ()
    note: str = ""
    launched: str = ""
    waited: str = ""
    overlapped: int = 0
    following: int = 0
    predicted_start_s: float | None = None
    predicted_end_s: float | None = None


@dataclass(frozen=True)
class BucketDocument:
    """A bucket, and when it was on its way.

    Attributes:
        name: in profiles and timelines: ``DDP 0 (Net) bucket 3``; empty if it never ran.
        plan: what was decided, and what became of it.
        times: in recorded steps, of this rank; ``None`` where none were recorded.
        predicted_s: when the network was expected to begin and to be done with it, by the clock of
            those steps; ``None`` where that is not known.
    """

    name: str
    plan: BucketReport
    times: BucketTimes | None
    predicted_s: tuple[float, float] | None = None


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
        decision: in the mode ``"auto"``, why these buckets were chosen, with predicted times; one
            sentence each.
    """

    mode: str
    collectives_before: int
    collectives_after: int
    buckets: tuple[BucketReport, ...]
    rejections: tuple[RejectionReport, ...]
    digest: str
    from_cache: bool = False
    decision: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, from_cache=False)), sort_keys=True)

    def fingerprint(self) -> str:
        """Equal for equal reports; 16 hexadecimal digits. Ranks may differ in it: how gradients are
        stored can depend on the machine, what is sent cannot."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @staticmethod
    def from_json(text: str) -> FusionReport:
        """The report that ``to_json`` wrote, marked as read from a cache."""
        data: dict[str, Any] = json.loads(text)
        buckets = tuple(
            BucketReport(
                **{
                    **bucket,
                    "parameters": tuple(bucket["parameters"]),
                    "copied": tuple((name, reason) for name, reason in bucket["copied"]),
                }
            )
            for bucket in data.pop("buckets")
        )
        rejections = tuple(RejectionReport(**item) for item in data.pop("rejections"))
        data["from_cache"] = True
        data["decision"] = tuple(data["decision"])
        return FusionReport(buckets=buckets, rejections=rejections, **data)


def with_copies(report: FusionReport, index: int, copied: Mapping[int, str]) -> FusionReport:
    """The report with what is known about the storing of a bucket's gradients.

    Args:
        report: of the graph.
        index: the bucket's number.
        copied: why a gradient is copied, by its number among the bucket's parameters.
    """
    bucket = report.buckets[index]
    named = tuple((bucket.parameters[number], copied[number]) for number in sorted(copied))
    buckets = list(report.buckets)
    buckets[index] = replace(bucket, copied=named)
    return replace(report, buckets=tuple(buckets))


def report_plan(plan: BucketPlan, mode: str) -> FusionReport:
    """The report of a plan that was carried out."""
    reductions = sum(len(bucket.members) for bucket in plan.buckets)
    left_alone = sum(item.owner is None for item in plan.rejections)
    return FusionReport(
        mode=mode,
        collectives_before=reductions + len(plan.rejections),
        collectives_after=len(plan.buckets) + left_alone,
        buckets=tuple(
            _report_bucket(bucket, placement, mode)
            for bucket, placement in zip_longest(plan.buckets, plan.placements)
        ),
        rejections=tuple(
            RejectionReport(f"{item.node.name} ({item.node.target})", item.reason)
            for item in plan.rejections
        ),
        digest=hashlib.sha256(f"{mode} {plan.digest()}".encode()).hexdigest()[:16],
    )


def _report_bucket(bucket: Bucket, placement: Placement | None, mode: str) -> BucketReport:
    owner = bucket.members[0].owner
    return BucketReport(
        module=owner.module,
        group=owner.process_group,
        dtype=dtype_name(bucket.key.dtype),
        num_bytes=bucket.num_bytes,
        sent_bytes=bucket.sent_bytes,
        cap_bytes=0,
        scaling=bucket.scaling.method,
        parameters=tuple(member.owner.parameter for member in bucket.members),
        note=FLATTENS if mode == "coalesced" and owner.backend == "gloo" else "",
        launched=placement.why_launched() if placement else "",
        waited=placement.why_waited() if placement else "",
        overlapped=placement.overlapped if placement else 0,
        following=placement.following if placement else 0,
    )


FLATTENS = (
    "Gloo copies the gradients into a buffer of its own, reduces that, and copies them back: "
    "mode 'concat' does without"
)
