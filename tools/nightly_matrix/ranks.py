"""What a rank tells about its part of a cell, as JSON. Nothing here imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    """An exception.

    Attributes:
        kinds: names of its class and of the classes above that.
        text: what it says.
        backwards: how many were recorded before it.
        trace: where it was raised.
    """

    kinds: tuple[str, ...]
    text: str
    backwards: int
    trace: str


@dataclass(frozen=True)
class RankReport:
    """One rank's part of a cell.

    Attributes:
        rank: which.
        eager: why eager DDP could not be trained.
        fused: why it could not be trained under the flag.
        differences: where the two differ, in words.
        gradients: how many parameters of DDP modules got a dense gradient that was to be averaged.
        covered: how many of them are in buckets by what the package reports.
        before: collectives that were traced, in all graphs.
        after: collectives that are launched instead.
        warned: the texts of the package's warnings.
    """

    rank: int
    eager: Failure | None = None
    fused: Failure | None = None
    differences: tuple[str, ...] = ()
    gradients: int = 0
    covered: int = 0
    before: int = 0
    after: int = 0
    warned: tuple[str, ...] = field(default=())

    @property
    def is_fused(self) -> bool:
        """Whether all gradients are in buckets, and these are fewer than the gradients."""
        return self.covered >= self.gradients > 0 and self.after < self.before

    def write(self, directory: Path) -> None:
        """Put the report where :func:`read_reports` finds it; it appears whole or not at all."""
        path = report_path(directory, self.rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def report_path(directory: Path, rank: int) -> Path:
    """Where a rank's report lies."""
    return directory / f"rank-{rank}.json"


def read_reports(directory: Path, ranks: int) -> list[RankReport | None]:
    """The report of each rank; ``None`` for one that has written none."""
    paths = [report_path(directory, rank) for rank in range(ranks)]
    return [_read(path) if path.exists() else None for path in paths]


def _read(path: Path) -> RankReport:
    data: dict[str, Any] = json.loads(path.read_text())
    for way in ("eager", "fused"):
        failure = data[way]
        if failure is not None:
            data[way] = Failure(**{**failure, "kinds": tuple(failure["kinds"])})
    for name in ("differences", "warned"):
        data[name] = tuple(data[name])
    return RankReport(**data)
