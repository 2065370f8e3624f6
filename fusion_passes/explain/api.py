"""The whole report of this process."""

from __future__ import annotations

import itertools
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import torch
import torch.distributed as dist

from fusion_passes.explain.recording import recordings
from fusion_passes.flag import active_config
from fusion_passes.passes.pipeline import PASS_NAMES
from fusion_passes.reporting.advice import advice
from fusion_passes.reporting.backwards import backwards
from fusion_passes.reporting.document import SCHEMA, GraphDocument, Report, Totals, graph_documents
from fusion_passes.reporting.journal import journal
from fusion_passes.reporting.modules import ModuleReport, module_reports, named_buckets
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
    modules = module_reports(times, predicted_s)
    if not modules and recordings.last is not None:
        modules = recordings.last.modules
    graphs = graph_documents(journal.reports(), names, times, predicted_s)
    # A graph that launches a bucket of a module knows more of it: where it is waited for.
    parts: tuple[ModuleReport | GraphDocument, ...] = (*modules, *graphs)
    buckets = itertools.chain.from_iterable(part.buckets for part in parts)
    ran = {bucket.name: bucket for bucket in buckets if bucket.name}
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
        advice(steps, list(ran.values())),
        modules,
        graphs,
        backwards.reports(),
        timeline.predicted_from if timeline is not None else "",
        _totals(modules, steps, timeline),
        timeline,
    )


def _totals(
    modules: Sequence[ModuleReport],
    steps: StepTimes | None,
    timeline: Timeline | None,
) -> Totals:
    plans = [bucket.plan for module in modules for bucket in module.buckets]
    peak, of = _peak_memory()
    first = backwards.first_ended_s
    return Totals(
        sum(len(plan.parameters) for plan in plans),
        len(plans),
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
