"""Formats a report as text: for a terminal, a log, or a trace of ``tlparse``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from fusion_passes.reducer.warnings import named
from fusion_passes.reporting.records import (
    BackwardReport,
    BucketReport,
    FusionReport,
    ModuleReport,
    ReducedIn,
    Report,
    SentParameters,
    Totals,
)

SCALED: Final = MappingProxyType(
    {
        "none": "not scaled",
        "rows": "sparse: rows divided and summed",
        "collective": "averaged by the collective",
        "hook": "passed to the communication hook",
        "store": "scaled when stored",
        "bucket": "scaled in the bucket",
        "result": "scaled after the wait",
    }
)

MOST_ROWS: Final = 40
"""Number of buckets of one module or graph that are shown; the report itself has all of them."""

_REDUCED_IN: Final[Mapping[ReducedIn, str]] = MappingProxyType(
    {
        "reducer": "by the reducer while the backward ran",
        "compiled_autograd": "in a graph that compiled autograd traced",
    }
)

_Line: TypeAlias = tuple[str, str]
"""The head of a line, and its text, which is folded behind the head."""


def format_report(report: Report | FusionReport, *, width: int = 100) -> str:
    """The report as plain text: warnings first, advice last.

    Args:
        report: report of this process, or of one graph.
        width: number of columns; longer lines are folded.
    """
    lines = _of_graph(report) if isinstance(report, FusionReport) else _of_process(report)
    return "\n".join(part for head, text in lines for part in _folded(head, text, width))


def _folded(head: str, text: str, width: int) -> list[str]:
    room = max(width - len(head), 20)
    first, *rest = textwrap.wrap(text, room, break_long_words=False) or [""]
    return [head + first, *(" " * len(head) + line for line in rest)]


def format_bytes(count: int) -> str:
    """``512 B``, ``1.5 KiB``, ``25.0 MiB``, ``1.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} GiB"


def _of_process(report: Report) -> Iterator[_Line]:
    for text in report.warnings:
        yield "warning: ", text
    if not (report.modules or report.graphs or report.backwards):
        yield "", "ddp_fusion: no backward of a DDP module has run under the flag in this process."
        return
    for module in report.modules:
        yield from _of_module(module)
    for graph in report.graphs:
        yield from _of_graph(graph)
    for item in report.backwards:
        yield "", _of_backwards(item)
    yield from _of_totals(report.totals)
    if report.advice:
        yield "advice: ", report.advice


def _of_module(module: ModuleReport) -> Iterator[_Line]:
    hook = f" {module.hook}" if module.hook else ""
    hook += ", each gradient to the owner of its parameter" if module.shard_optimizer else ""
    where = f"{module.mode}{hook}, {_counted(module.group_size, 'rank')} over {module.backend}"
    if not module.buckets:
        text = f"{module.name}: no averaged backward has ended yet, so it has no buckets ({where})"
        yield "", text
        return
    title = (
        f"{module.name}: {module.gradients} gradients in "
        f"{_counted(len(module.buckets), 'bucket')}, {module.stored} stored there by compiled "
        f"backwards in the last step ({where})"
    )
    yield "", title
    yield from _rows(module.buckets)
    for sentence in module.decision:
        yield "buckets: ", sentence
    if module.memory != "plain":
        yield "memory: ", module.memory
    yield from _copies(module.buckets)
    if module.sent_parameters is not None:
        yield "parameters: ", _of_parameters(module.sent_parameters)


def _of_parameters(sent: SentParameters) -> str:
    return (
        f"owners sent {format_bytes(sent.num_bytes)} after optimizer.step() in "
        f"{sent.took_s * 1000:.1f} ms; the host waited for {sent.waited_s * 1000:.1f} ms of that"
    )


def _of_graph(graph: FusionReport) -> Iterator[_Line]:
    times = f", compiled {graph.compiled} times" if graph.compiled > 1 else ""
    title = (
        f"ddp_fusion {graph.mode}: {graph.collectives_before} collectives traced, "
        f"{graph.collectives_after} launched a step (plan {graph.digest}{times})"
    )
    yield "", title
    if graph.buckets:
        yield from _rows(graph.buckets, shows_module=True)
    yield from _copies(graph.buckets)
    for item in graph.rejections:
        yield "left alone: ", f"{item.collective}: {item.reason}"


# --- Buckets -------------------------------------------------------------------------------------


def _rows(buckets: Sequence[BucketReport], *, shows_module: bool = False) -> Iterator[_Line]:
    """A row for each bucket: its number, its size and, if any bucket was timed, when the network
    sent it and how much of that was exposed, followed by what was done with it."""
    is_timed = any(bucket.times is not None for bucket in buckets)
    titles = _cells("sent, ms", "exposed") if is_timed else ""
    yield f"bucket{'size':>12}{titles}  ", "what was done"
    for number, bucket in enumerate(buckets[:MOST_ROWS]):
        times = _times(bucket) if is_timed else ""
        head = f"{number:>6}{format_bytes(bucket.num_bytes):>12}{times}  "
        for text in _done(bucket, shows_module):
            yield head, text
            head = " " * len(head)
    if len(buckets) > MOST_ROWS:
        yield "", f"and {len(buckets) - MOST_ROWS} more buckets, which the JSON lists"


def _times(bucket: BucketReport) -> str:
    times = bucket.times
    if times is None:
        return _cells("", "")
    sent = f"{times.started_s * 1e3:.1f} to {times.ended_s * 1e3:.1f}"
    return _cells(sent, f"{times.exposed_s * 1e3:.1f}")


def _cells(sent: str, exposed: str) -> str:
    return f"{sent:>18}{exposed:>9}"


def _done(bucket: BucketReport, shows_module: bool) -> Iterator[str]:
    """The gradients of a bucket, and what was done with them."""
    yield named(bucket.parameters, of=f" of {bucket.module}" if shows_module else "")
    is_cast = bucket.sent_bytes != bucket.num_bytes
    sent = f" sent as {format_bytes(bucket.sent_bytes)}" if is_cast else ""
    copied = f"{len(bucket.copied)} copied" if bucket.copied else "stored without a copy"
    yield f"{bucket.dtype}{sent}, {SCALED[bucket.scaling]}, {copied}"
    if bucket.waited:
        yield f"waited for {bucket.waited}"


def _copies(buckets: Sequence[BucketReport]) -> Iterator[_Line]:
    """The gradients that are copied, by reason."""
    names: dict[str, list[str]] = {}
    for bucket in buckets:
        for name, reason in bucket.copied:
            names.setdefault(reason, []).append(name)
    for reason, copied in names.items():
        yield "copied: ", f"{named(copied)}: {reason}"


def _counted(count: int, noun: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- The process ---------------------------------------------------------------------------------


def _of_backwards(item: BackwardReport) -> str:
    because = f", because {item.because}" if item.because else ""
    copied = f", {item.copied} copied into their buckets" if item.copied else ""
    where = f"reduced {_REDUCED_IN[item.reduced_in]}{because}{copied}"
    return f"{_counted(item.count, 'backward')} of {', '.join(item.modules)}: {where}"


def _of_totals(totals: Totals) -> Iterator[_Line]:
    if totals.steps is not None:
        steps = totals.steps
        overlap = f"{totals.overlap:.0%} of it hidden, " if totals.overlap is not None else ""
        plain = f", {totals.plain_step_s * 1e3:.1f} ms without it" if totals.plain_step_s else ""
        text = (
            f"{steps.step_s * 1e3:.1f} ms under the profiler{plain}; network busy for "
            f"{steps.network_s * 1e3:.1f} ms, {overlap}{steps.exposed_s * 1e3:.1f} ms "
            f"({steps.exposed_s / steps.step_s:.1%} of the step) exposed"
        )
        yield "a step: ", text
    if totals.launches:
        text = (
            f"{totals.gradients} gradients in {_counted(totals.launches, 'bucket')} per step; "
            f"{format_bytes(totals.num_bytes)} of gradients, {format_bytes(totals.sent_bytes)} "
            f"sent, {totals.copied_gradients} gradients copied"
        )
        yield "", text
