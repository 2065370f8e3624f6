"""What a rank tells about a scenario, as JSON. Nothing here imports torch."""

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
    """One rank's part.

    Attributes:
        rank: which.
        eager: why eager DDP could not be trained.
        fused: why it could not be trained under the flag.
        differences: where the two differ, in words.
        gradients: how many parameters of DDP modules got a dense gradient that was to be averaged.
        reduced_in: where the package says that gradients of its backwards were reduced: by a
            reducer, in graphs, or ``"none"``.
        rejected: why gradients in traced graphs are in no bucket.
        before: collectives that were traced, in all graphs.
        after: collectives that are launched instead.
        launches: collectives of DDP's groups in the backwards that average, from the least to the
            most, once buckets are rebuilt.
        traced: backwards that compiled autograd has traced.
        unwaited: tensors of compiled collectives that nobody has waited for: numbers can be right
            by luck where a bucket was read too early.
        warned: the texts of the package's warnings.
    """

    rank: int
    eager: Failure | None = None
    fused: Failure | None = None
    differences: tuple[str, ...] = ()
    gradients: int = 0
    reduced_in: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    before: int = 0
    after: int = 0
    launches: tuple[int, ...] = ()
    traced: int = 0
    unwaited: int = 0
    warned: tuple[str, ...] = field(default=())

    @property
    def is_fused(self) -> bool:
        """Whether each backward was reduced while it ran, by reducers or in traced graphs; there in
        buckets that are fewer than gradients."""
        while_it_ran = bool(self.reduced_in) and "none" not in self.reduced_in
        is_traced = "compiled_autograd" in self.reduced_in
        are_in_buckets = not self.rejected and (self.after < self.before or not is_traced)
        return self.gradients > 0 and while_it_ran and are_in_buckets

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
    for name in ("differences", "reduced_in", "rejected", "launches", "warned"):
        data[name] = tuple(data[name])
    return RankReport(**data)
