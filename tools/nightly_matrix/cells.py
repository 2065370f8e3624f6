"""What the matrix is made of. Nothing here imports torch: a list of cells must come at once."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testing.scenarios.entries import Scenario


@dataclass(frozen=True)
class Cell:
    """One scenario in one mode and dtype: what runs in processes of its own."""

    scenario: Scenario
    mode: str
    dtype: str

    @property
    def name(self) -> str:
        """``ddp-2/concat/fp32/plain``."""
        scenario = self.scenario
        return f"{scenario.parallelism}/{self.mode}/{self.dtype}/{scenario.feature}"

    @property
    def is_quick(self) -> bool:
        return self.mode in self.scenario.quick and self.dtype == self.scenario.dtypes[0]

    @property
    def file_name(self) -> str:
        """The name as a part of a path."""
        return re.sub(r"[^0-9A-Za-z_.-]+", "_", self.name)


def cells_of(scenarios: Iterable[Scenario]) -> list[Cell]:
    """All cells, in the order of the scenarios.

    Raises:
        ValueError: two cells have one name.
    """
    cells = [
        Cell(scenario, mode, dtype)
        for scenario in scenarios
        for dtype in scenario.dtypes
        for mode in scenario.modes
    ]
    names = [cell.name for cell in cells]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"cells must have names of their own, but these come twice: {double}")
    return cells


def select(cells: Sequence[Cell], patterns: Sequence[str], *, quick: bool) -> list[Cell]:
    """The cells whose names match one of the patterns, if any are given.

    Args:
        cells: to choose from.
        patterns: as of a shell, for the whole name (``ddp-2/*/bf16/*``) or, without a slash, for
            one of its parts (``no-sync*``).
        quick: whether to leave out what does not belong to the quick selection.

    Raises:
        ValueError: a pattern matches none of the cells.
    """
    for pattern in patterns:
        if not any(_matches(cell, pattern) for cell in cells):
            raise ValueError(f"--select {pattern!r} matches none of {len(cells)} cells; see --list")
    return [
        cell
        for cell in cells
        if (cell.is_quick or not quick)
        and (not patterns or any(_matches(cell, pattern) for pattern in patterns))
    ]


def _matches(cell: Cell, pattern: str) -> bool:
    parts = [cell.name] if "/" in pattern else cell.name.split("/")
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts)
