"""Rows of figures of the bench and of the GPU check, and the table that shows them. Nothing here
imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        title: subject of the row, in Markdown. For a method: its case, a colon, and its name.
        is_right: whether the result is as expected.
        words: a remark: the error, or a warning.
        figures: figures by column name, which contains the unit; ``None`` if there is none.
    """

    title: str
    is_right: bool = True
    words: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)


def figures_table(rows: Sequence[Row]) -> str:
    """All figures of the rows as a Markdown table, with a column for each figure that any row
    has."""
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
    """A figure with three digits, or more if it is larger."""
    if value is None or not math.isfinite(value):
        return ""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 3)}f}"
