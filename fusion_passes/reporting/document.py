"""All that is known of what the flag has done in this process, as plain values: what
``fusion_passes.report()`` returns, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fusion_passes.reporting.backwards import BackwardReport
from fusion_passes.reporting.drawing import write_timeline
from fusion_passes.reporting.modules import ModuleReport
from fusion_passes.reporting.records import (
    BucketDocument,
    BucketReport,
    FusionReport,
    RejectionReport,
)
from fusion_passes.reporting.timeline import BucketTimes, StepTimes, Timeline

SCHEMA: Final = "fusion_passes.report/2"
"""Name and version of the JSON. A field that comes makes no new version; one that goes, or means
something else, does."""


@dataclass(frozen=True)
class GraphDocument:
    """A graph of compiled autograd with gradient reductions.

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


@dataclass(frozen=True)
class Totals:
    """Sums over what is used, and what was measured.

    Attributes:
        gradients: how many a step has that are averaged in buckets, of all modules.
        launches: how many buckets it launches for them, by one collective each.
        num_bytes: of the gradients in buckets.
        sent_bytes: of what is sent for them.
        copied_gradients: how many gradients were copied into their bucket in the last step.
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
        modules: the DDP modules that are there now and that reducers average, in the order of their
            construction; where none is left, those that were there when steps were recorded.
        graphs: of compiled autograd, one for each plan, in the order in which the first was
            compiled.
        backwards: how gradients were reduced, and why so.
        predicted_from: from what it is known when the network was expected to be busy with buckets,
            or why it is not; empty where no steps were recorded, or nothing is sent.
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
    modules: tuple[ModuleReport, ...]
    graphs: tuple[GraphDocument, ...]
    backwards: tuple[BackwardReport, ...]
    predicted_from: str
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
) -> tuple[GraphDocument, ...]:
    """The graphs of some reports, each plan once, with what was measured of their buckets.

    Args:
        reports: in the order in which they were compiled.
        names: the parameters of each bucket that runs, by its name in profiles.
        times: when a bucket was on its way, by that name.
        predicted_s: when it was expected to be, by that name and the same clock.
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
        )
        for *earlier, last in by_plan.values()
    )


def _name_of(bucket: BucketReport, names: Mapping[str, tuple[str, ...]]) -> str:
    held = sorted(bucket.parameters)
    found = [
        name
        for name, parameters in names.items()
        if sorted(parameters) == held and name.startswith(f"{bucket.module} ")
    ]
    on_group = [name for name in found if f" on group {bucket.group} " in name]
    return next(iter(on_group or found), "")
