"""All that is known of what the flag has done in this process, as plain values: what
``fusion_passes.report()`` returns, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fusion_passes.reporting.backwards import BackwardReport
from fusion_passes.reporting.drawing import write_timeline
from fusion_passes.reporting.records import BucketReport, FusionReport, RejectionReport, RowsReport
from fusion_passes.reporting.replans import ReplanReport
from fusion_passes.reporting.timeline import BucketTimes, StepTimes, Timeline

SCHEMA: Final = "fusion_passes.report/1"
"""Name and version of the JSON. A field that comes makes no new version; one that goes, or means
something else, does."""


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
class GraphDocument:
    """A compiled graph with gradient reductions.

    Attributes:
        mode: how buckets are reduced.
        digest: of its plan: equal for equal plans, on every rank.
        from_cache: whether this process took it from the FX graph cache.
        compiled: how many graphs with this plan the process has compiled or loaded.
        collectives_before: launches in the graph as it was traced, others than DDP's included.
        collectives_after: launches in the graph as it runs.
        decision: in the mode ``"auto"``, why these buckets were chosen; one sentence each.
        buckets: in the order of their launches.
        left_alone: the collectives that are not DDP's, in graph order.
        is_used: whether it runs: not where another plan of the same backward was kept.
    """

    mode: str
    digest: str
    from_cache: bool
    compiled: int
    collectives_before: int
    collectives_after: int
    decision: tuple[str, ...]
    buckets: tuple[BucketDocument, ...]
    left_alone: tuple[RejectionReport, ...]
    is_used: bool


@dataclass(frozen=True)
class Totals:
    """Sums over what is used, and what was measured.

    Attributes:
        gradients: how many a step has that are averaged in buckets, of all modules.
        launches: how many all-reduces of buckets it launches for them.
        collectives_before: launches as traced, of all graphs. Here and in the next ones, a graph
            that runs for several blocks of a module counts once.
        collectives_after: launches as they run, of all graphs.
        num_bytes: of the gradients in buckets, of all graphs.
        sent_bytes: of what is sent for them.
        copied_gradients: how many gradients are copied into their bucket.
        steps: times of recorded steps, of this rank; ``None`` where none were recorded.
        overlap: share of the time of the network that is hidden by compute; ``None`` likewise, and
            where nothing was sent.
        plain_step_s: seconds of a step before the recording, without a profiler; ``None`` likewise.
        peak_memory_bytes: the largest memory so far: allocated on the GPU, or the process's.
        peak_memory_of: which of the two: ``"cuda"`` or ``"process"``.
        startup_s: seconds of compiling, by phase:
            :func:`fusion_passes.reporting.startup.startup_seconds`.
        first_backward_s: seconds from the import of the package to the end of the first backward
            whose gradients were reduced; ``None`` if there was none.
    """

    gradients: int
    launches: int
    collectives_before: int
    collectives_after: int
    num_bytes: int
    sent_bytes: int
    copied_gradients: int
    steps: StepTimes | None
    overlap: float | None
    plain_step_s: float | None
    peak_memory_bytes: int
    peak_memory_of: str
    startup_s: Mapping[str, float]
    first_backward_s: float | None


@dataclass(frozen=True)
class Report:
    """What the flag has done in this process, and what came of it.

    Attributes:
        schema: :data:`SCHEMA`.
        versions: of ``fusion_passes``, ``torch`` and ``python``.
        rank: this rank; ``None`` without process groups.
        world_size: number of ranks; likewise.
        flag: the options that are set now, by name; ``None`` where the flag is off.
        warnings: what the process has warned of.
        advice: one line on what is worth trying; empty if there is none.
        graphs: one for each plan, in the order in which the first was compiled.
        rows: sparse gradients, of the modules that are there now.
        backwards: in which graph gradients were reduced, and why in that one.
        predicted_from: from what it is known when the network was expected to be busy with buckets,
            or why it is not; empty where no steps were recorded, or nothing is sent.
        replans: what became of planning buckets once more from measured steps, by module.
        totals: sums, and what was measured.
        timeline: the steps that were recorded last, of all ranks on rank 0; ``None`` if there are
            none. It is no part of the JSON.
    """

    schema: str
    versions: Mapping[str, str]
    rank: int | None
    world_size: int | None
    flag: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    advice: str
    graphs: tuple[GraphDocument, ...]
    rows: tuple[RowsReport, ...]
    backwards: tuple[BackwardReport, ...]
    predicted_from: str
    replans: tuple[ReplanReport, ...]
    totals: Totals
    timeline: Timeline | None = field(repr=False, compare=False)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON; ``docs/report.schema.json`` describes it."""
        data = {name: value for name, value in vars(self).items() if name != "timeline"}
        return json.dumps(data, default=_plain, indent=indent)

    def write_timeline(self, path: str | Path) -> None:
        """Write the recorded steps; see :func:`fusion_passes.reporting.drawing.write_timeline`.

        Raises:
            ValueError: no steps were recorded on this rank, or the name's end says no form.
        """
        if self.timeline is None:
            raise ValueError(
                "A timeline needs steps that were recorded, and there are none on this rank. Call "
                "fusion_passes.record_steps() before them."
            )
        write_timeline(self.timeline, path)

    def scalars(self) -> dict[str, float]:
        """Numbers to log beside the loss, by names that TensorBoard groups under ``ddp_fusion``.
        Those that were not measured are missing."""
        totals = self.totals
        known: dict[str, float | None] = {
            "gradients": totals.gradients,
            "launches": totals.launches,
            "collectives_before": totals.collectives_before,
            "collectives_after": totals.collectives_after,
            "buckets": sum(len(graph.buckets) for graph in self.graphs if graph.is_used),
            "sent_mib": totals.sent_bytes / 2**20,
            "copied_gradients": totals.copied_gradients,
            "peak_memory_mib": totals.peak_memory_bytes / 2**20,
            "overlap": totals.overlap,
            "warnings": len(self.warnings),
        }
        if totals.steps is not None:
            known |= asdict(totals.steps)
        return {f"ddp_fusion/{name}": value for name, value in known.items() if value is not None}


def _plain(value: Any) -> Any:
    return asdict(value)


def graph_documents(
    reports: Iterable[FusionReport],
    names: Mapping[str, tuple[str, ...]],
    times: Mapping[str, BucketTimes],
    predicted_s: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    dropped: Collection[str] = (),
) -> tuple[GraphDocument, ...]:
    """The graphs of some reports, each plan once, with what was measured of their buckets.

    Args:
        reports: in the order in which they were compiled.
        names: the parameters of each bucket that runs, by its name in profiles.
        times: when a bucket was on its way, by that name.
        predicted_s: when it was expected to be, by that name and the same clock.
        dropped: digests of the plans in whose place another one was kept.
    """
    by_plan: dict[str, list[FusionReport]] = {}
    for report in reports:
        by_plan.setdefault(report.digest, []).append(report)

    def document(bucket: BucketReport) -> BucketDocument:
        name = _name_of(bucket, names)
        return BucketDocument(name, bucket, times.get(name), predicted_s.get(name))

    return tuple(
        GraphDocument(
            last.mode,
            last.digest,
            last.from_cache,
            len(earlier) + 1,
            last.collectives_before,
            last.collectives_after,
            last.decision,
            tuple(map(document, last.buckets)),
            last.rejections,
            last.digest not in dropped,
        )
        for *earlier, last in by_plan.values()
    )


def planned_times(
    graphs: Iterable[GraphDocument],
) -> tuple[dict[str, tuple[float, float]], ...]:
    """When each graph's buckets are sent by its plan, by name, in seconds from its start; without
    the graphs whose plan does not say it, or that run no more."""
    found = []
    for graph in graphs:
        if not graph.is_used:
            continue
        times = {
            bucket.name: (bucket.plan.predicted_start_s, bucket.plan.predicted_end_s)
            for bucket in graph.buckets
            if bucket.name
        }
        known = {n: (a, b) for n, (a, b) in times.items() if a is not None and b is not None}
        found += [known] if known else []
    return tuple(found)


def _name_of(bucket: BucketReport, names: Mapping[str, tuple[str, ...]]) -> str:
    found = [
        name
        for name, parameters in names.items()
        if parameters == bucket.parameters and name.startswith(f"{bucket.module} ")
    ]
    on_group = [name for name in found if f" on group {bucket.group} " in name]
    return next(iter(on_group or found), "")
