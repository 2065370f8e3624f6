"""The results as a picture: the ways of each cell as bars against the limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench_steps.figures import (
    Spread,
    best_cap,
    bound_over_compute,
    defaults,
    network_over_compute,
)
from bench_steps.results import Cell
from bench_steps.run import Run

COLUMNS = 3
OURS, THEIRS, WRONG = "#1f6fb4", "#9aa5b1", "#c0392b"
LIMITS = {
    "compute alone": ("#2e7d32", ":"),
    "network alone": ("#b8860b", "--"),
    "lower bound": ("black", "-"),
}


def draw(run: Run, path: Path) -> None:
    """Write a PNG; nothing where there is no cell."""
    if not run.cells:
        return
    # Without a display, and without a window's state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The rates of a model beside each other, or models measured at one.
    rates = len({cell.rate for cell in run.cells})
    columns = rates if rates > 1 else min(COLUMNS, len(run.cells))
    lines = math.ceil(len(run.cells) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.6 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    places = [axes for line in grid for axes in line]
    for axes, cell in zip(places, run.cells, strict=False):
        _draw_cell(axes, cell)
    for axes in places[len(run.cells) :]:
        axes.set_visible(False)
    figure.suptitle(
        f"Training step over compute alone; {run.origin.versions}, {run.origin.machine}", fontsize=9
    )
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_cell(axes: Any, cell: Cell) -> None:
    rows = [*defaults(cell, ours=False), *defaults(cell, ours=True)]
    for place, result in enumerate(rows):
        if not result.ratios or result.reason:
            axes.text(0.02, place, " failed", va="center", fontsize=8, color=WRONG)
            continue
        spread = Spread.of(result.ratios)
        ours = result in defaults(cell, ours=True)
        color = OURS if ours else THEIRS
        hatch = "//" if result.wrong else None
        edge = WRONG if result.wrong else color
        error = [[spread.middle - spread.low], [spread.high - spread.middle]]
        axes.barh(place, spread.middle, color=color, hatch=hatch, edgecolor=edge, height=0.7)
        axes.errorbar(spread.middle, place, xerr=error, color="black", linewidth=0.8, capsize=2)
        words = " wrong" if result.wrong else f" {spread.middle:.2f}"
        axes.text(spread.high, place, words, va="center", fontsize=7)
        best = best_cap(cell, result.row.way)
        if best is not None:
            axes.plot(Spread.of(best.ratios).middle, place, "k|", markersize=11)
    if any(best_cap(cell, result.row.way) for result in rows):
        axes.plot([], [], "k|", markersize=11, linestyle="", label="at its best cap")
    _draw_limits(axes, cell)
    names = [result.row.label for result in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.set_title(cell.name, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_limits(axes: Any, cell: Cell) -> None:
    values = {
        "compute alone": 1.0,
        "network alone": network_over_compute(cell),
        "lower bound": bound_over_compute(cell),
    }
    for name, value in values.items():
        color, style = LIMITS[name]
        if value is not None:
            axes.axvline(value, color=color, linestyle=style, linewidth=1.2, label=name)
