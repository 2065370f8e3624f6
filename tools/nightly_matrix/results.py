"""Results of cells, kept as lines of JSON so that a run can be taken up again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from nightly_matrix.outcomes import Outcome

FILE = "results.jsonl"


@dataclass(frozen=True)
class Result:
    """What became of a cell in one run.

    Attributes:
        cell: its name.
        outcome: what became of it.
        seconds: how long it took.
        torch: the version that it ran on.
    """

    cell: str
    outcome: Outcome
    seconds: float
    torch: str


class ResultFile:
    """The results of a run, one a line, written as they come."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def append(self, result: Result) -> None:
        # A line whose writing was interrupted must not spoil this one.
        text = self._path.read_text() if self._path.exists() else ""
        torn = text != "" and not text.endswith("\n")
        with self._path.open("a") as file:
            file.write("\n" * torn + json.dumps(asdict(result)) + "\n")

    def read(self, torch: str) -> dict[str, Result]:
        """By cell, the last one of each; those of another version of torch are left out, and so is
        a line whose writing was interrupted."""
        results = {}
        text = self._path.read_text() if self._path.exists() else ""
        for line in text.splitlines():
            try:
                data = json.loads(line)
            except ValueError:
                continue
            result = Result(**{**data, "outcome": Outcome(**data["outcome"])})
            if result.torch == torch:
                results[result.cell] = result
        return results
