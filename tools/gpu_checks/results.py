"""Results of parts, each a JSON file, so that a run can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of a part's table.

    Attributes:
        title: what it is about; Markdown.
        is_right: whether it is as it must be.
        words: what else there is to say: why not, or a warning.
        figures: by their column's name, with the unit in it; ``None`` where there is none.
    """

    title: str
    is_right: bool = True
    words: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What became of a part.

    Attributes:
        part: its name.
        key: of the machine and the code; see :attr:`gpu_checks.machine.Machine.key`.
        backend: of its process group.
        seconds: how long it took.
        rows: its table.
        failure: why it has not come to its end; empty if it has.
    """

    part: str
    key: str
    backend: str
    seconds: float
    rows: tuple[Row, ...] = ()
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and bool(self.rows) and all(row.is_right for row in self.rows)

    def write(self, directory: Path) -> None:
        """Put the result where :func:`read_result` finds it; it appears whole or not at all."""
        path = _path(directory, self.part)
        begun = path.with_suffix(".part")
        begun.write_text(json.dumps(asdict(self), indent=1) + "\n")
        begun.replace(path)


def read_result(directory: Path, part: str, key: str) -> Result | None:
    """A part's result; ``None`` if there is none, or one of another machine or other code."""
    path = _path(directory, part)
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    if data["key"] != key:
        return None
    rows = tuple(Row(**row) for row in data.pop("rows"))
    return Result(**data, rows=rows)


def _path(directory: Path, part: str) -> Path:
    return directory / f"{part}.json"
