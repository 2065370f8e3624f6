"""What the benches and the GPU check keep: where figures are from, rows of figures, and the page
that shows them. Nothing here imports torch."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import command_line

FORMAT: Final = 2
"""Of the JSON files."""

TOOL: Final = "tools/bench.py"

RATIO: Final = "time over no DDP"
PEAK: Final = "peak over no DDP"


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


@dataclass(frozen=True)
class Origin:
    """Where figures are from.

    Attributes:
        date: in ISO's form.
        command: that repeats them.
        versions: of torch and Python.
        machine: its cores.
    """

    date: str
    command: str
    versions: str
    machine: str

    @classmethod
    def here(cls, part: str, arguments: Sequence[str]) -> Origin:
        """Return the origin of figures that are measured now on this machine.

        Args:
            part: of the bench; empty if the command names none.
            arguments: of the part.
        """
        command = shlex.join(["python", TOOL, *([part] if part else []), *arguments])
        versions = f"torch {version('torch')}, Python {platform.python_version()}"
        return cls(str(datetime.date.today()), command, versions, _machine())


def page(title: str, origin: Origin, *paragraphs: str) -> str:
    """A page of Markdown: a title, where its figures are from, and paragraphs or tables."""
    said = f"{origin.date}, {origin.versions}, {origin.machine}."
    blocks = [f"# {title}", said, f"Reproduce: `{origin.command}`.", *paragraphs]
    return "\n\n".join(block.strip("\n") for block in blocks if block.strip()) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table of Markdown.

    Args:
        columns: its head.
        rows: as many cells each.
        words: how many columns at the left hold words; the others hold numbers.
    """
    marks = ["---"] * words + ["---:"] * (len(columns) - words)
    lines = [columns, marks, *([cell.replace("|", "/") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures_table(rows: Sequence[Row]) -> str:
    """All figures of rows, a column for each that one of them has."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.figures.items() if value is not None
    )
    lines = [
        [
            row.title,
            *(number(row.figures.get(name)) for name in names),
            f"{'' if row.is_right else '**wrong** '}{row.words}",
        ]
        for row in rows
    ]
    return table(["", *names, "remarks"], lines)


def overview(rows: Iterable[Row]) -> str:
    """A row for each case, a column for each method; empty without methods."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        case, _, method = row.title.partition(": ")
        if PEAK in row.figures:
            cases.setdefault(case, {})[method] = row
    methods = list(dict.fromkeys(name for found in cases.values() for name in found))
    if not methods:
        return ""
    plain, others = methods[0], methods[1:]
    lines = [
        [case, number(found[plain].figures["ms"]), *(_in_short(found.get(m)) for m in others)]
        for case, found in cases.items()
    ]
    words = "Time of a step over no DDP; in brackets, peak memory over no DDP."
    return f"{words}\n\n{table(['', f'{plain}, ms', *others], lines)}"


def _in_short(row: Row | None) -> str:
    if row is None or row.figures[RATIO] is None:
        return ""
    peak = number(row.figures[PEAK])
    wrong = "" if row.is_right else " **wrong**"
    return f"{number(row.figures[RATIO])}{f' ({peak})' if peak else ''}{wrong}"


def number(value: float | None) -> str:
    """A figure with three digits, or more where it is larger."""
    if value is None or not math.isfinite(value):
        return ""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 3)}f}"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A part's command line, with the options that all parts have."""
    parser = command_line.parser_of(description)
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the figures and the page")
    return parser


def write(
    output: Path | None, part: str, origin: Origin, figures: dict[str, Any], text: str
) -> None:
    """Keep a page in a directory, beside what was measured; each appears whole or not at all."""
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    data = {"format": FORMAT, "part": part, **asdict(origin), **figures}
    whole = {f"{part}.json": json.dumps(data, default=_plain) + "\n", f"{part}.md": text}
    for name, content in whole.items():
        begun = output / f"{name}.part"
        begun.write_text(content)
        begun.replace(output / name)


def _plain(value: Any) -> Any:
    """A dataclass as what JSON has words for."""
    as_plain: Callable[[Any], Any] = asdict
    return as_plain(value)


def _machine() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or sys.platform
