"""What was done to each graph that compiled autograd has traced, as this process knows it.

A graph that comes from Inductor's FX graph cache was compiled by another process, so no pass runs
here. But Inductor stores with a graph what its compile has added to the counters, and adds it again
on a hit: the name of a counter carries the report.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from fusion_passes.plan.buckets import BucketPlan, TracedBucket
from fusion_passes.plan.placement import Placement
from fusion_passes.reductions.find import dtype_name
from fusion_passes.reporting.records import BucketReport, FusionReport, RejectionReport
from fusion_passes.reporting.table import format_report
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.inductor import inductor_counters, trace_artifact

COUNTER_PREFIX: Final = "ddp_fusion_plan:"


class CompileLog:
    """The reports of this process, oldest first."""

    def __init__(self) -> None:
        self._reports: list[FusionReport] = []
        self._counted: dict[str, int] = {}
        # Graphs that are being lowered, by label: the report so far, and the buckets still to come.
        self._pending: dict[str, tuple[FusionReport, frozenset[int]]] = {}

    def expect(self, report: FusionReport, label: str, buckets: Collection[int]) -> None:
        """Record a graph once it is known how its gradients are stored, which only its lowering
        knows.

        Args:
            report: all that is known so far.
            label: by which :meth:`packed` will name the graph.
            buckets: numbers of the buckets that will be lowered.
        """
        self._expect(report, label, frozenset(buckets))

    def packed(self, label: str, copied: Mapping[int, str]) -> None:
        """Note how a bucket's gradients are stored.

        Args:
            label: the graph's, a colon, and the bucket's number.
            copied: why a gradient is copied, by its number in the bucket.
        """
        name, _, number = label.rpartition(":")
        if name in self._pending:
            report, missing = self._pending.pop(name)
            index = int(number)
            self._expect(_with_copies(report, index, copied), name, missing - {index})

    def _expect(self, report: FusionReport, label: str, missing: frozenset[int]) -> None:
        if missing:
            self._pending[label] = report, missing
        else:
            self.add(report)

    def add(self, report: FusionReport) -> None:
        """Record a graph that this process compiled, and leave word for those that will take it
        from the cache."""
        self._reports.append(report)
        trace_artifact("ddp_fusion_report", lambda: format_report(report))
        key = _packed(report)
        inductor_counters()[key] += 1
        self._counted[key] = self._counted.get(key, 0) + 1

    def reports(self) -> tuple[FusionReport, ...]:
        self._read_cached()
        return tuple(self._reports)

    def reset(self) -> None:
        """Forget all, and have torch's counters forget it."""
        for key in _counted_by_torch():
            del inductor_counters()[key]
        vars(self).update(vars(CompileLog()))

    def _read_cached(self) -> None:
        """Add the graphs that came from the cache since the last call."""
        counted = _counted_by_torch()
        for key, count in counted.items():
            # A user may have cleared the counters: then all that is there is new.
            known = self._counted.get(key, 0)
            new = count - known if count >= known else count
            self._reports += [_unpacked(key)] * new
        self._counted = counted


def _counted_by_torch() -> dict[str, int]:
    counters = inductor_counters()
    return {key: n for key, n in counters.items() if key.startswith(COUNTER_PREFIX)}


def _packed(report: FusionReport) -> str:
    """The report as the name of a counter."""
    return COUNTER_PREFIX + base64.b85encode(zlib.compress(pickle.dumps(report))).decode()


def _unpacked(key: str) -> FusionReport:
    """The report of a graph that the FX graph cache, which is pickled itself, has given."""
    data = zlib.decompress(base64.b85decode(key.removeprefix(COUNTER_PREFIX)))
    report: FusionReport = pickle.loads(data)
    return replace(report, from_cache=True)


compile_log: Final = process_state.keep(
    CompileLog(), "what was done to each compiled graph", Lifetime.PROCESS, reset=CompileLog.reset
)


# --- What was done to a graph --------------------------------------------------------------------


def _with_copies(report: FusionReport, index: int, copied: Mapping[int, str]) -> FusionReport:
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


def one_for_each_plan(reports: Iterable[FusionReport]) -> tuple[FusionReport, ...]:
    """The latest graph of each plan, in the order in which the first of each was compiled."""
    by_plan: dict[str, list[FusionReport]] = {}
    for report in reports:
        by_plan.setdefault(report.digest, []).append(report)
    return tuple(replace(of_plan[-1], compiled=len(of_plan)) for of_plan in by_plan.values())
