"""Rows of figures, of the bench and of the GPU check, and the table that shows them. Nothing here
imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        title: what it is about; Markdown. Of a method: its case, a colon, and its name.
        is_right: whether it is as it must be.
        words: what else there is to say: why not, or a warning.
        figures: by their column's name, with the unit in it; ``None`` where there is none.
    """

    title: str
    is_right: bool = True
    words: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)


def figures_table(rows: Sequence[Row]) -> str:
    """All figures of rows as a table of Markdown, a column for each that one of them has."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.figures.items() if value is not None
    )
    lines = [["", *names, "remarks"], ["---", *("---:" for _ in names), "---"]]
    for row in rows:
        figures = (number(row.figures.get(name)) for name in names)
        remarks = f"{'' if row.is_right else '**wrong** '}{row.words}"
        lines.append([row.title, *figures, remarks.replace("|", "/")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """A figure with three digits, or more where it is larger."""
    if value is None or not math.isfinite(value):
        return ""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 3)}f}"
