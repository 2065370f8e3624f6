"""What has changed since another run."""

from __future__ import annotations

from collections.abc import Iterator

from bench_steps.figures import Spread
from bench_steps.pages import verdict
from bench_steps.results import Cell, RowResult
from bench_steps.run import Run

SAME = "within the spread"


def compare(old: Run, new: Run) -> str:
    """A table of all rows of both runs: their step over compute alone, then and now.

    A row that only one of them has is left out; one that failed, or has other gradients, is told.
    """
    lines = [
        f"Since {old.origin.date} ({old.origin.versions}, `{old.origin.command}`):",
        "",
        "| cell | way | was | is | change | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    rows = [line for cell in new.cells for line in _cell(cell, old)]
    return "\n".join([*lines, *(rows or ["| no row is in both runs | | | | | |"])]) + "\n"


def _cell(cell: Cell, old: Run) -> Iterator[str]:
    before = next((other for other in old.cells if other.name == cell.name), None)
    for result in cell.rows:
        was = before.find(result.row) if before else None
        if was is not None and result.row.kind == "way":
            yield f"| {cell.name} | {result.row.label} | {_change(was, result)} |"


def _change(was: RowResult, now: RowResult) -> str:
    words = [verdict_of(was), verdict_of(now)]
    told = "" if words[0] == words[1] else f"{words[0]}, now {words[1]}"
    if not was.ratios or not now.ratios:
        return f" | | | {told or words[1]}"
    then, here = Spread.of(was.ratios), Spread.of(now.ratios)
    apart = then.high < here.low or here.high < then.low
    change = f"{here.middle / then.middle - 1:+.1%}"
    return f"{then} | {here} | {change} | {told or ('' if apart else SAME)}"


def verdict_of(result: RowResult) -> str:
    """What became of a row, in a word or two."""
    return "failed" if result.reason or not result.ratios else verdict(result)
