"""Timelines of one step of a method: measured in processes of their own, described, and drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench_steps.processes import Place, RowProcesses
from bench_steps.rows import Row
from fusion_passes.reporting.spans import LANES, RankTimeline, Span

COLORS: Final = {
    "compute": "#2e7d32",
    "launch": "#1f6fb4",
    "wait": "#c0392b",
    "network": "#b8860b",
}

STEPS: Final = 5
"""Of which the one of middle length is kept."""


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        cell: its name.
        row: which way.
        ranks: by rank.
    """

    cell: str
    row: str
    ranks: tuple[RankTimeline, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        ranks = tuple(
            RankTimeline(rank["seconds"], tuple(Span(**span) for span in rank["spans"]))
            for rank in data["ranks"]
        )
        return cls(data["cell"], data["row"], ranks)


def start(row: Row, place: Place, timeout_s: float) -> RowProcesses:
    """Processes of a row whose kernels say their names to the profiler.

    Raises:
        RowFailed: they cannot be started.
    """
    processes = RowProcesses(row, place, timeline=True)
    try:
        processes.ask("start", timeout_s=timeout_s)
    except BaseException:
        processes.kill()
        raise
    return processes


def measure(processes: RowProcesses, cell: str) -> Timeline:
    """The timeline of a step.

    Raises:
        RowFailed: there is none.
    """
    by_rank: list[list[RankTimeline]] = processes.ask("timelines", STEPS)
    steps = list(zip(*by_rank, strict=True))
    lengths = [max(rank.seconds for rank in ranks) for ranks in steps]
    middle = lengths.index(statistics.median_low(lengths))
    return Timeline(cell, processes.row.label, steps[middle])


def as_markdown(timelines: Sequence[Timeline]) -> str:
    """A table of where the time of each step goes, in milliseconds."""
    lines = [
        "## Where the time of one step goes",
        "",
        "By the profiler, whose own time is in it; ms. *Hidden*: the network is busy while the",
        "rank computes.",
        "",
        "| cell | way | rank | step | compute | launches | waits | network busy | hidden |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for timeline in timelines:
        for number, rank in enumerate(timeline.ranks):
            seconds = [rank.seconds, *(rank.busy_s(lane) for lane in LANES), rank.hidden_s()]
            values = " | ".join(f"{value * 1000:.1f}" for value in seconds)
            lines.append(f"| {timeline.cell} | {timeline.row} | {number} | {values} |")
    return "\n".join(lines) + "\n"


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Write a PNG: a picture for each timeline, in it the lanes of each rank."""
    # Without a display, and without a window's state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = len(LANES) * max(len(timeline.ranks) for timeline in timelines)
    height = (0.28 * lanes + 0.9) * len(timelines)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(timelines), 1, squeeze=False)
    longest = max(rank.seconds for timeline in timelines for rank in timeline.ranks)
    for (axes,), timeline in zip(grid, timelines, strict=True):
        names: list[str] = []
        for number, rank in enumerate(timeline.ranks):
            for lane in LANES:
                spans = [span for span in rank.spans if span.lane == lane]
                bars = [(s.start_s * 1e3, (s.end_s - s.start_s) * 1e3) for s in spans]
                axes.broken_barh(bars, (len(names) - 0.4, 0.8), color=COLORS[lane], linewidth=0.5)
                names.append(f"rank {number}, {lane}")
            axes.axvline(rank.seconds * 1e3, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1e3 * 1.02)
        axes.set_title(f"{timeline.cell}: {timeline.row}", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
    grid[-1][0].set_xlabel("ms from the start of a step", fontsize=8)
    figure.savefig(path, dpi=110)
