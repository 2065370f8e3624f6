"""The events that ranks write while they run, and the record of a finished run.

A rank appends a line of JSON for each event, so that nothing is lost when it is killed. Nothing
here imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 3


@dataclass(frozen=True)
class Failure:
    """An exception with its causes, the outermost first.

    Attributes:
        kinds: class names.
        texts: messages.
        after_s: time at which it was caught, from the first fault, in seconds.
        step: number of the step.
    """

    kinds: tuple[str, ...]
    texts: tuple[str, ...]
    after_s: float
    step: int

    def brief(self) -> str:
        lines = self.texts[0].strip().splitlines() or [""]
        return f"{' < '.join(self.kinds)}: {' / '.join(lines[:LAST_LINES])}"[:300]


@dataclass
class RankRecord:
    """The record of one rank. Times are in seconds, from the first fault of the run, or from its
    start.

    Attributes:
        rank: number of the rank.
        exit_code: as in :class:`subprocess.Popen`; ``None`` if it hung.
        end_s: time of its end.
        is_hit: whether the fault reached it.
        steps: number of steps without an error.
        failures: exceptions that it caught or died of.
        failed_before: number of these before a launcher restarted it.
        result: return value of its program.
        log: the last lines that it printed.
    """

    rank: int
    exit_code: int | None = None
    end_s: float = 0.0
    is_hit: bool = False
    steps: int = 0
    failures: list[Failure] = field(default_factory=list)
    failed_before: int = 0
    result: Mapping[str, Any] | None = None
    log: str = ""

    @property
    def is_right(self) -> bool:
        has_failed = len(self.failures) > self.failed_before
        return self.exit_code == 0 and self.result is not None and not has_failed

    @property
    def first_error_s(self) -> float | None:
        """Time at which it first raised, or ended in a way other than by a Python exception."""
        if self.failures:
            return self.failures[0].after_s
        return self.end_s if self.exit_code else None

    def value_of(self, name: str, default: Any) -> Any:
        """A value in the result of its program."""
        return (self.result or {}).get(name, default)


@dataclass
class RunRecord:
    """The record of all ranks.

    Attributes:
        way: eager, compiled, or a mode.
        ranks: ranks of the first training, then of the others.
        left: processes that still existed after the ranks had ended, and files in TMPDIR.
    """

    way: str
    ranks: list[RankRecord]
    left: list[str] = field(default_factory=list)


def events_path(directory: Path, rank: int) -> Path:
    """File that a rank writes its events to."""
    return directory / f"rank-{rank}.jsonl"


def write_event(path: Path, **values: Any) -> None:
    """Append an event with the machine's time."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of events, which may still be being written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def failure_of(error: BaseException) -> dict[str, Any]:
    """An exception and its chain, for :func:`write_event`."""
    kinds, texts, seen = list[str](), list[str](), set[int]()
    waiting: list[BaseException | None] = [error]
    while waiting:
        item = waiting.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        kinds.append(type(item).__name__)
        texts.append(str(item)[:2000])
        waiting += [item.__cause__, item.__context__, getattr(item, "inner_exception", None)]
    return {"kinds": kinds, "texts": texts}


def add_events(record: RankRecord, events: list[dict[str, Any]], origin: float) -> None:
    """Add a rank's events to its record; ``origin``: time of the fault."""
    for item in events:
        if item["event"] == "start":
            record.failed_before = len(record.failures)
        elif item["event"] == "fault":
            record.is_hit = True
        elif item["event"] == "step":
            record.steps += 1
        elif item["event"] == "error":
            kinds, texts = tuple(item["kinds"]), tuple(item["texts"])
            record.failures.append(Failure(kinds, texts, item["time"] - origin, item["step"]))
        elif item["event"] == "result":
            record.result = item["result"]
