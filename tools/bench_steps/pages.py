"""The results as text for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench_steps import timelines
from bench_steps.figures import (
    Spread,
    Target,
    best_cap,
    bound_over_compute,
    cpu_over_limits,
    defaults,
    fastest,
    is_balanced,
    network_over_compute,
    peak_over_compute,
    targets,
    warm_over_compute,
)
from bench_steps.results import COMPUTE, NETWORK, REFERENCE, TRACED_COMPUTE, Cell, RowResult
from bench_steps.run import Run
from workloads.ways import WAYS

COLUMNS = (
    "way",
    "step over compute alone",
    "ms",
    "over lower bound",
    "with contention",
    "best cap",
    "CPU",
    "peak memory",
    "cold start, s",
    "warm start, s",
    "gradients",
)

LEGEND = """\
All figures are of the same run, in which the ways took turns in each round. *Step*: forward and
backward, without an optimizer; its time over that of compute alone (compiled, no DDP) in the same
round, median and quartiles over the rounds. *Lower bound*: of a step with these ready times of
gradients and these costs of all-reduces, in the best possible buckets; *with contention*: where
all-reduces also take from compute what matrix products lose beside one. *Best cap*: the fastest of
the caps that were tried. *CPU*: CPU seconds of all ranks over those of compute alone and network
alone. *Peak memory*: of a step, beyond parameters, over compute alone. *Cold* and *warm start*:
wrapping in DDP and the first step, with an empty compiler cache and in a second process.
*Gradients*: beside eager DDP's in the same run. *No DDP, traced backward*: compute alone with its
backward under compiled autograd, as torch's passes and its Python reducer have it.
"""


def as_markdown(run: Run) -> str:
    """All tables of a run, with what is needed to read and to repeat them."""
    lines = ["# Training steps under each way to reduce gradients", ""]
    lines += [*run.origin.lines(), *LEGEND.splitlines(), ""]
    for cell in run.cells:
        lines += [*_cell(cell), ""]
    if run.timelines:
        lines += [timelines.as_markdown(run.timelines), ""]
    lines += [f"Not measured: {name}: {reason}\n" for name, reason in run.failures.items()]
    return "\n".join(lines).rstrip() + "\n"


def _cell(cell: Cell) -> list[str]:
    lines = [f"## {cell.name}", "", _limits(cell), "", f"| {' | '.join(COLUMNS)} |"]
    lines.append("| --- |" + " ---: |" * (len(COLUMNS) - 2) + " --- |")
    rows = [*defaults(cell, ours=False), *defaults(cell, ours=True)]
    best, traced = fastest(rows), cell.find(TRACED_COMPUTE)
    rows = [traced, *rows] if traced else rows
    lines += [_row(cell, result, is_best=result is best) for result in rows]
    groups = sorted({result.group for result in rows})
    if len(groups) > 1:
        lines += ["", "Not in the same rounds:", ""]
        names = {group: [r.row.label for r in rows if r.group == group] for group in groups}
        lines += [f"* {', '.join(labels)}" for labels in names.values()]
    lines += ["", *_failures(rows)]
    lines += [f"{result.row.label}: {result.plan}.\n" for result in rows if result.plan]
    lines += _firsts(cell, [result for result in rows if result.first_s])
    reached = [_target(target) for target in targets(cell)]
    if reached:
        lines += ["| ours | to reach | is | |", "| --- | ---: | ---: | --- |", *reached]
    return lines


def _firsts(cell: Cell, rows: Sequence[RowResult]) -> list[str]:
    """The first averaged step of a process, over eager DDP's in the same round."""
    eager = cell.find(REFERENCE)
    if eager is None or not eager.first_s or not rows:
        return []
    lines = [
        "The first averaged step of a process, beyond compiling:",
        "",
        "| way | ms | over eager DDP's |",
        "| --- | ---: | ---: |",
    ]
    for result in rows:
        ms = 1000 * statistics.median(result.first_s)
        pairs = zip(result.first_s, eager.first_s, strict=False)
        ratio = Spread.of([mine / theirs for mine, theirs in pairs])
        lines.append(f"| {result.row.label} | {ms:.1f} | {ratio} |")
    return [*lines, ""]


def _limits(cell: Cell) -> str:
    compute, network = cell.find(COMPUTE), cell.find(NETWORK)
    assert compute is not None
    assert network is not None
    share, bound = network_over_compute(cell), bound_over_compute(cell)
    balanced = ", balanced" if is_balanced(cell) else ""
    parts = [
        f"{cell.total_bytes / 2**20:.1f} MiB in {len(cell.gradient_bytes)} gradients",
        f"compute alone {_milliseconds(compute)} ms",
        f"network alone {_milliseconds(network)} ms ({_number(share)} of compute alone{balanced})",
        f"lower bound {_number(bound)} of compute alone",
    ]
    contended = bound_over_compute(cell, contended=True)
    if contended is not None:
        taken = f"an all-reduce takes {cell.taken} from the compute beside it"
        parts.append(f"with contention {_number(contended)} ({taken})")
    return "; ".join(parts) + "."


def _row(cell: Cell, result: RowResult, *, is_best: bool) -> str:
    name = f"**{result.row.label}**" if is_best else result.row.label
    if result.reason:
        return f"| {name} | failed |{' |' * (len(COLUMNS) - 2)}"
    ratio = Spread.of(result.ratios)
    bounds = [bound_over_compute(cell, contended=contended) for contended in (False, True)]
    capped = best_cap(cell, result.row.way)
    cpu = cpu_over_limits(cell, result)
    values = [
        str(ratio),
        _milliseconds(result),
        *(_number(ratio.middle / bound if bound else None) for bound in bounds),
        _capped(capped),
        _number(cpu.middle if cpu else None),
        _number(peak_over_compute(cell, result)),
        _seconds(result.cold_s, None),
        _seconds(result.warm_s, warm_over_compute(cell, result)),
        verdict(result),
    ]
    return f"| {name} | {' | '.join(values)} |"


def verdict(result: RowResult) -> str:
    """What became of the gradients, in a word or two."""
    if not WAYS[result.row.way].has_ddp:
        return ""
    if result.wrong:
        return "**wrong**"
    return f"equal; {result.buffers} buffers differ" if result.buffers else "equal"


def _capped(result: RowResult | None) -> str:
    if result is None:
        return ""
    return f"{result.row.cap_mb:g} MB: {statistics.median(result.ratios):.2f}"


def _failures(rows: Sequence[RowResult]) -> list[str]:
    told = [(row.row.label, row.reason or row.wrong) for row in rows]
    return [f"{label}: {reason.strip().splitlines()[0]}\n" for label, reason in told if reason]


def _target(target: Target) -> str:
    words = {True: "reached", False: "**missed**", None: "not measured"}[target.is_met]
    value = "" if target.value is None else str(target.value)
    if target.value is not None and target.value.low == target.value.high:
        value = f"{target.value.middle:.2f}"
    return f"| {target.words} | {target.limit:.2f} | {value} | {words} |"


def _milliseconds(result: RowResult) -> str:
    return f"{statistics.median(result.seconds) * 1000:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(value: float | None, ratio: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if ratio is None else f"{value:.1f} ({ratio:.2f})"
