"""What the matrix is made of. Nothing here imports torch: a list of cells must come at once."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MODES = ("concat", "coalesced")


@dataclass(frozen=True)
class Scenario:
    """What is trained; a row of the table, for each dtype that it is trained in.

    Attributes:
        parallelism: how the ranks share the work; a word for selections.
        feature: what is tried; a word for selections.
        title: the same for people; Markdown.
        target: the function that trains, as ``module:function``; it takes a
            :class:`nightly_matrix.run.Run`.
        ranks: processes.
        dtypes: of the gradients, or of autocast where the target is about that.
        tolerance_eps: what an element may differ by from eager DDP, in eps of its dtype and
            of the largest element of its tensor; 0 for the same bits.
        must_fail: eager DDP has nothing to compare with, and each rank must raise an error that
            names ``ddp_fusion`` and this text. Empty: it is to be trained.
        group_timeout_s: how long a collective may take.
        quick: whether it belongs to the quick selection, in its first dtype; which modes.
    """

    parallelism: str
    feature: str
    title: str
    target: str
    ranks: int = 2
    dtypes: tuple[str, ...] = ("fp32",)
    tolerance_eps: float = 0.0
    must_fail: str = ""
    group_timeout_s: float = 60.0
    quick: tuple[str, ...] = ()


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
        for mode in MODES
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
