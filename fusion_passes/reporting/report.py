"""The whole report of this process: what was done, what was measured, and what is worth trying."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

import torch
import torch.distributed as dist

from fusion_passes.config import __version__, active_config
from fusion_passes.reducer.warnings import warnings_so_far
from fusion_passes.reporting.graphs import compile_log, one_for_each_plan
from fusion_passes.reporting.modules import backward_counts, module_reports
from fusion_passes.reporting.recording import last_recording
from fusion_passes.reporting.records import SCHEMA, BucketReport, ModuleReport, Report, Totals
from fusion_passes.reporting.timeline import BucketTimes, StepTimes, Timeline


def report() -> Report:
    """The report of what the flag did in this process, and of what was measured.

    If :func:`fusion_passes.record_steps` was not called before, nothing is measured, and all times
    are ``None``. Nothing is sent to other ranks.
    """
    config = active_config()
    timeline = last_recording[0].timeline if last_recording else None
    joined = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if joined else None
    modules = module_reports()
    steps = None
    if timeline is not None:
        # By position: after destroy_process_group(), the number of this rank is unknown.
        mine = timeline.ranks[0]
        steps = mine.times()
        modules = tuple(_with_times(modules, mine.bucket_times(timeline.buckets)))
    graphs = one_for_each_plan(compile_log.reports())
    sent, traced = ([b for part in parts for b in part.buckets] for parts in (modules, graphs))
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
        advice(steps, sent, traced),
        modules,
        graphs,
        backward_counts.reports(),
        _totals(modules, steps, timeline),
        timeline,
    )


def _with_times(
    modules: Iterable[ModuleReport], times: Mapping[str, BucketTimes]
) -> Iterator[ModuleReport]:
    """The modules, each with the times that this rank recorded of its buckets."""
    for item in modules:
        buckets = (replace(bucket, times=times.get(bucket.name)) for bucket in item.buckets)
        yield replace(item, buckets=tuple(buckets))


def _totals(
    modules: Sequence[ModuleReport], steps: StepTimes | None, timeline: Timeline | None
) -> Totals:
    buckets = [bucket for module in modules for bucket in module.buckets]
    return Totals(
        sum(len(bucket.parameters) for bucket in buckets),
        len(buckets),
        sum(bucket.num_bytes for bucket in buckets),
        sum(bucket.sent_bytes for bucket in buckets),
        sum(len(bucket.copied) for bucket in buckets),
        steps,
        steps.hidden_s / steps.network_s if steps is not None and steps.network_s else None,
        timeline.plain_step_s if timeline is not None else None,
    )


# --- What is worth trying ------------------------------------------------------------------------

NEGLIGIBLE: Final = 0.05
"""Share of a step: with less exposed communication, there is nothing to gain beyond noise."""

SMALL_BYTES: Final = 2**19
"""Bytes of a bucket: the time of a smaller bucket is mostly the network's latency."""

MOST: Final = 0.5
"""Share of the exposed time: a bucket with this share, or more, is the one that matters."""


def advice(
    steps: StepTimes | None, buckets: Sequence[BucketReport], traced: Sequence[BucketReport] = ()
) -> str:
    """The most useful thing to try; empty if nothing was measured, or nothing can be gained.
    ``buckets`` are the modules' buckets in launch order, ``traced`` the buckets of the graphs that
    compiled autograd traced."""
    if steps is None or steps.exposed_s < NEGLIGIBLE * steps.step_s:
        return ""
    share = steps.exposed_s / steps.step_s
    begin = f"{share:.0%} of a step is exposed communication"
    if steps.network_s > steps.compute_s:
        return (
            f"{begin}: the network is busy for {_ms(steps.network_s)} and the rank computes for "
            f"{_ms(steps.compute_s)}, so no order of buckets can hide all of it. Send less "
            '(reduce_dtype="bf16"), or less often (a larger batch per step, or no_sync).'
        )
    early = [item for item in traced if item.overlapped < item.following]
    if early:
        return (
            f"{begin}: the bucket of {early[0].parameters[0]} is waited for {early[0].waited}. "
            "Keep code that reads gradients out of the compiled backward."
        )
    return f"{begin}: {_worst(steps, buckets)}"


def _worst(steps: StepTimes, buckets: Sequence[BucketReport]) -> str:
    timed = [(item, item.times) for item in buckets if item.times is not None]
    if not timed:
        return "it comes from collectives other than the buckets' all-reduces."
    worst, times = max(timed, key=lambda pair: pair[1].exposed_s)
    share = times.exposed_s / steps.exposed_s
    if share < MOST:
        return (
            'no single bucket causes most of it. Try ddp_fusion = "auto", which compares buckets, '
            "or another bucket_cap_mb, and compare the step time."
        )
    names = worst.parameters
    last = "the last bucket" if worst is timed[-1][0] else worst.name
    held = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if worst.num_bytes < SMALL_BYTES:
        remedy = (
            "Its time is the latency of a message, which no cap shortens: use a larger batch, or "
            "no_sync, to send fewer."
        )
    elif len(names) == 1:
        remedy = "It is a single gradient, which no cap makes smaller: use reduce_dtype."
    else:
        remedy = "A lower bucket_cap_mb launches a part of it earlier."
    return f"{last} causes {share:.0%} of that: it holds {held}. {remedy}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
