"""The report as tables in a terminal. Needs rich."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_passes.reporting.backwards import ReducedIn
from fusion_passes.reporting.document import GraphDocument, Report
from fusion_passes.reporting.modules import ModuleReport
from fusion_passes.reporting.records import BucketDocument
from fusion_passes.reporting.table import SCALED, copies_by_reason, format_bytes

MOST_ROWS: Final = 40
"""Buckets of one module or graph that a terminal shows; the JSON has all."""

MOST_NAMES: Final = 4
"""Parameters that a terminal shows where several are named."""

_REDUCED_IN: Final[Mapping[ReducedIn, str]] = MappingProxyType(
    {
        "reducer": "by a reducer, while the backward ran",
        "compiled_autograd": "in a graph that compiled autograd traced",
    }
)

LOG_WIDTH: Final = 120
"""Columns where there is no terminal."""


def console_for(file: TextIO) -> Console:
    """A console that writes to a file: as wide as the terminal, if it is one."""
    return Console(file=file, highlight=False, width=None if file.isatty() else LOG_WIDTH)


def show(report: Report, console: Console) -> None:
    """Print the report: warnings first, advice last."""
    for text in report.warnings:
        console.print(Text.assemble(("warning ", "bold yellow"), text))
    if not (report.modules or report.graphs or report.backwards):
        console.print(
            "ddp_fusion: no backward of a DDP module has run under the flag in this process."
        )
        return
    for module in report.modules:
        _show_module(module, console)
    for graph in report.graphs:
        _show_graph(graph, console)
    predicted = [f"predicted: {report.predicted_from}"] if report.predicted_from else []
    lines = (*predicted, *_backwards(report), *_totals(report))
    for line in lines:
        console.print(Text(line))
    if report.advice:
        console.print(Text.assemble(("advice ", "bold green"), report.advice))


def _show_module(module: ModuleReport, console: Console) -> None:
    hook = f" {module.hook}" if module.hook else ""
    where = f"{module.mode}{hook}, {_counted(module.group_size, 'rank')} over {module.backend}"
    if not module.buckets:
        console.print(
            Text(f"{module.name}: no averaged backward has ended, so it has no buckets ({where})")
        )
        return
    _show_plan(
        f"{module.name}: {module.gradients} gradients in "
        f"{_counted(len(module.buckets), 'bucket')}, {module.stored} stored there by compiled "
        f"backwards in the last step ({where})",
        module,
        console,
    )
    if module.memory != "plain":
        console.print(Text(f"memory: {module.memory}"))


def _show_graph(graph: GraphDocument, console: Console) -> None:
    source = "from the FX graph cache" if graph.from_cache else "compiled here"
    times = f", {graph.compiled} times" if graph.compiled > 1 else ""
    _show_plan(
        f"ddp_fusion {graph.mode}: {graph.collectives_before} collectives traced, "
        f"{graph.collectives_after} launched a step ({source}{times}, plan {graph.digest})",
        graph,
        console,
    )
    for item in graph.left_alone:
        console.print(Text(f"left alone: {item.collective}: {item.reason}"))


def _show_plan(title: str, of: ModuleReport | GraphDocument, console: Console) -> None:
    """The buckets of a module or a graph, why they are these, and what is copied into them."""
    _show_buckets(title, of.buckets, console)
    for sentence in of.decision:
        console.print(Text(f"buckets: {sentence}"))
    _show_copies(of.buckets, console)


def _show_copies(buckets: Sequence[BucketDocument], console: Console) -> None:
    for reason, names in copies_by_reason(*(item.plan for item in buckets)).items():
        console.print(Text(f"copied: {_shown_names(names)}: {reason}"))


def _show_buckets(title: str, buckets: Sequence[BucketDocument], console: Console) -> None:
    """Print a table with a row for each bucket."""
    timed = any(bucket.times is not None for bucket in buckets)
    predicted = any(bucket.predicted_s is not None for bucket in buckets)
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
    )
    table.add_column("bucket", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("gradients", ratio=2, overflow="fold")
    table.add_column("what was done", ratio=3, overflow="fold")
    if timed:
        table.add_column("sent, ms", justify="right", no_wrap=True)
        if predicted:
            table.add_column("predicted", justify="right", no_wrap=True)
        table.add_column("exposed", justify="right", no_wrap=True)
    for number, bucket in enumerate(buckets[:MOST_ROWS]):
        cells = [str(number), *_plan(bucket)]
        if timed:
            cells += _times(bucket, predicted)
        table.add_row(*map(Text, cells))
    console.print(table)
    hidden = len(buckets) - MOST_ROWS
    if hidden > 0:
        console.print(f"and {hidden} buckets more, which the JSON has")


def _plan(bucket: BucketDocument) -> Iterator[str]:
    plan = bucket.plan
    yield format_bytes(plan.num_bytes)
    yield _shown_names(plan.parameters)
    sent = "" if plan.sent_bytes == plan.num_bytes else f" sent as {format_bytes(plan.sent_bytes)}"
    how = [f"{plan.dtype}{sent}, {SCALED[plan.scaling]}"]
    how.append(f"{len(plan.copied)} copied" if plan.copied else "stored without a copy")
    if plan.launched:
        how.append(f"launched {plan.launched}")
    if plan.waited:
        how.append(f"waited for {plan.waited}")
    yield "\n".join([*how, *([plan.note] if plan.note else [])])


def _times(bucket: BucketDocument, predicted: bool) -> Iterator[str]:
    """When the network was busy with a bucket, when it was expected to be if that is known of any,
    and what of it was exposed."""
    times = bucket.times
    yield "" if times is None else _interval(times.started_s, times.ended_s)
    if predicted:
        yield "" if bucket.predicted_s is None else _interval(*bucket.predicted_s)
    yield "" if times is None else f"{times.exposed_s * 1e3:.1f}"


def _interval(start_s: float, end_s: float) -> str:
    return f"{start_s * 1e3:.1f} to {end_s * 1e3:.1f}"


def _counted(count: int, noun: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _shown_names(parameters: Sequence[str]) -> str:
    """``6: a, b, c, d and 2 more``."""
    more = len(parameters) - MOST_NAMES
    names = ", ".join(parameters[:MOST_NAMES])
    return f"{len(parameters)}: {names}" + (f" and {more} more" if more > 0 else "")


def _backwards(report: Report) -> Iterator[str]:
    for item in report.backwards:
        because = f", because {item.because}" if item.because else ""
        modules = ", ".join(item.modules)
        copied = f", {item.copied} copied into their buckets" if item.copied else ""
        where = f"reduced {_REDUCED_IN[item.reduced_in]}{because}{copied}"
        yield f"{_counted(item.count, 'backward')} of {modules}: {where}"


def _totals(report: Report) -> Iterator[str]:
    totals = report.totals
    if totals.steps is not None:
        steps = totals.steps
        overlap = f"{totals.overlap:.0%} of it hidden, " if totals.overlap is not None else ""
        plain = f", {totals.plain_step_s * 1e3:.1f} ms without" if totals.plain_step_s else ""
        yield (
            f"a step: {steps.step_s * 1e3:.1f} ms under the profiler{plain}; network busy for "
            f"{steps.network_s * 1e3:.1f} ms, {overlap}{steps.exposed_s * 1e3:.1f} ms "
            f"({steps.exposed_s / steps.step_s:.1%} of the step) exposed"
        )
    of = "allocated on the GPU" if totals.peak_memory_of == "cuda" else "of the process"
    sent = (
        f"{totals.gradients} gradients in {_counted(totals.launches, 'bucket')} a step; "
        f"{format_bytes(totals.num_bytes)} of gradients, {format_bytes(totals.sent_bytes)} sent, "
        f"{totals.copied_gradients} gradients copied; "
    )
    peak = f"peak memory {of}: {format_bytes(totals.peak_memory_bytes)}"
    yield f"{sent if totals.launches else ''}{peak}"
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in totals.startup_s.items())
    first = totals.first_backward_s
    until = f"first backward after {first:.1f} s; " if first is not None else ""
    yield f"start: {until}seconds of compiling: {phases}"
