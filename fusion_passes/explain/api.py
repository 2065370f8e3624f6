"""The whole report of this process."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final

import torch
import torch.distributed as dist

from fusion_passes.ddp.naming import named_buckets, named_rows
from fusion_passes.explain.recording import recordings
from fusion_passes.flag import active_config
from fusion_passes.passes.pipeline import PASS_NAMES
from fusion_passes.reporting.advice import advice
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.document import SCHEMA, GraphDocument, Report, Totals, graph_documents
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.replans import replans
from fusion_passes.reporting.startup import startup_seconds
from fusion_passes.reporting.timeline import StepTimes, Timeline
from fusion_passes.reporting.warnings import warnings_so_far
from fusion_passes.version import __version__

_IMPORTED_S: Final = time.monotonic()


def report() -> Report:
    """What the flag has done in this process, and what was measured of it.

    Without :func:`fusion_passes.record_steps` before, nothing is measured, and all times are
    ``None``. Nothing is sent to other ranks.
    """
    config = active_config()
    timeline = recordings.last.timeline if recordings.last is not None else None
    joined = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if joined else None
    names = named_buckets()
    mine = next((item for item in timeline.ranks if item.rank == rank), None) if timeline else None
    steps = mine.times() if mine is not None else None
    times = mine.bucket_times(names) if mine is not None else {}
    started_s = {name: item.started_s for name, item in times.items()}
    predicted_s = timeline.predicted_times(started_s) if timeline is not None else {}
    tried = replans.reports()
    dropped = {item.dropped_plan for item in tried}
    graphs = graph_documents(journal.reports(), names, times, predicted_s, dropped)
    ran = [bucket for graph in graphs for bucket in graph.buckets if bucket.name]
    return Report(
        SCHEMA,
        {
            "fusion_passes": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        rank,
        dist.get_world_size() if joined else None,
        None if config is None else asdict(config),
        warnings_so_far(),
        advice(steps, ran),
        graphs,
        named_rows(),
        backwards.reports(),
        timeline.predicted_from if timeline is not None else "",
        tried,
        _totals(names, [graph for graph in graphs if graph.is_used], steps, timeline),
        timeline,
    )


def _totals(
    names: Mapping[str, Sequence[str]],
    graphs: Sequence[GraphDocument],
    steps: StepTimes | None,
    timeline: Timeline | None,
) -> Totals:
    plans = [bucket.plan for graph in graphs for bucket in graph.buckets]
    peak, of = _peak_memory()
    first = backwards.first_ended_s
    return Totals(
        sum(not name.startswith("(") for sent in names.values() for name in sent),
        len(names),
        sum(graph.collectives_before for graph in graphs),
        sum(graph.collectives_after for graph in graphs),
        sum(plan.num_bytes for plan in plans),
        sum(plan.sent_bytes for plan in plans),
        sum(len(plan.copied) for plan in plans),
        steps,
        steps.hidden_s / steps.network_s if steps is not None and steps.network_s else None,
        timeline.plain_step_s if timeline is not None else None,
        peak,
        of,
        startup_seconds(PASS_NAMES),
        None if first is None else first - _IMPORTED_S,
    )


def _peak_memory() -> tuple[int, str]:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "cuda"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
