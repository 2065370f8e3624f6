"""What ranks write while they run, and what is known of a run once it is over.

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
    """An exception with those behind it, the outermost first.

    Attributes:
        kinds: names of their classes.
        texts: what they say.
        after_s: when it was caught, from the first fault.
        step: in which step.
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
    """What became of one rank. Times are from the first fault of the run, or its start.

    Attributes:
        rank: which.
        exit_code: as of :class:`subprocess.Popen`; ``None`` if it hung.
        end_s: when it ended.
        is_hit: whether the fault has come to it.
        steps: how many it has done without an error.
        failures: which exceptions it caught or died of.
        failed_before: how many of them before a launcher has started it again.
        result: what its program returned.
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
        """When it raised first, or ended in a way that is none of Python's."""
        if self.failures:
            return self.failures[0].after_s
        return self.end_s if self.exit_code else None

    def value_of(self, name: str, default: Any) -> Any:
        """A value of what its program returned."""
        return (self.result or {}).get(name, default)


@dataclass
class RunRecord:
    """What became of all ranks.

    Attributes:
        way: eager, compiled, or a mode.
        ranks: of the first training, then of the others.
        left: processes that were still there after the ranks had ended, and files in TMPDIR.
    """

    way: str
    ranks: list[RankRecord]
    left: list[str] = field(default_factory=list)


def events_path(directory: Path, rank: int) -> Path:
    """Where a rank writes."""
    return directory / f"rank-{rank}.jsonl"


def write_event(path: Path, **values: Any) -> None:
    """Append an event, with the machine's time."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of events, also while it is written."""
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
    """Put what a rank has written into its record; ``origin`` is when the fault came."""
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
