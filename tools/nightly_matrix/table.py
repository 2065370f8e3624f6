"""The kept table: what each cell is known to become."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nightly_matrix.cells import Cell
from nightly_matrix.outcomes import KINDS, Kind, is_worse
from nightly_matrix.results import Result


@dataclass(frozen=True)
class Entry:
    """What a cell becomes, and the words for it."""

    outcome: Kind
    words: str = ""


@dataclass(frozen=True)
class Table:
    """Entries by the names of their cells.

    Attributes:
        torch: the version that they hold for; empty where nothing is kept yet.
        entries: the entries.
    """

    torch: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def to_json(self) -> str:
        """Sorted, so that equal tables are equal texts."""
        cells = {
            name: {"outcome": entry.outcome} | ({"words": entry.words} if entry.words else {})
            for name, entry in sorted(self.entries.items())
        }
        return json.dumps({"torch": self.torch, "cells": cells}, indent=1) + "\n"

    def worse(self, results: Mapping[str, Result]) -> list[str]:
        """The cells whose results are worse than what is kept of them."""
        return sorted(
            name
            for name, result in results.items()
            if name in self.entries and is_worse(result.outcome.kind, self.entries[name].outcome)
        )

    def better(self, results: Mapping[str, Result]) -> list[str]:
        """The cells whose results are better than what is kept of them."""
        return sorted(
            name
            for name, result in results.items()
            if name in self.entries and is_worse(self.entries[name].outcome, result.outcome.kind)
        )

    def updated(self, cells: Sequence[Cell], results: Mapping[str, Result], torch: str) -> Table:
        """This table with new results in it, and without cells that there are no more.

        Args:
            cells: all of the matrix.
            results: of some of them, or of all.
            torch: the version that they are from.

        Raises:
            ValueError: the results are of a part of the matrix, and of another version than the
                rest.
        """
        kept = {
            cell.name: self.entries[cell.name]
            for cell in cells
            if cell.name in self.entries and cell.name not in results
        }
        if kept and torch != self.torch:
            raise ValueError(
                f"{len(kept)} kept cells are of torch {self.torch}, but this is torch {torch}, and "
                "they were not run. Run all cells, or use that version."
            )
        new = {
            name: Entry(result.outcome.kind, result.outcome.words)
            for name, result in results.items()
        }
        return Table(torch, kept | new)


def read_table(path: Path) -> Table:
    """The table in a file; an empty one if there is no such file.

    Raises:
        ValueError: it holds an outcome that there is not.
    """
    if not path.exists():
        return Table()
    data = json.loads(path.read_text())
    entries = {}
    for name, cell in data["cells"].items():
        if cell["outcome"] not in KINDS:
            raise ValueError(
                f"{path}: {name} must be one of {KINDS}, but is {cell['outcome']!r}. Correct it, "
                "or run the cell anew with --keep."
            )
        entries[name] = Entry(cell["outcome"], cell.get("words", ""))
    return Table(data["torch"], entries)
