"""What ranks write while they run, and what is known of a run once it is over.

A rank appends a line of JSON for each event, so that nothing is lost when it is killed. All times
are of the machine's clock. Nothing here imports torch.
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
        time: when it was caught.
        step: in which step.
    """

    kinds: tuple[str, ...]
    texts: tuple[str, ...]
    time: float
    step: int

    def brief(self) -> str:
        lines = self.texts[0].strip().splitlines() or [""]
        return f"{' < '.join(self.kinds)}: {' / '.join(lines[:LAST_LINES])}"[:300]


@dataclass
class RankRun:
    """What became of one rank.

    Attributes:
        rank: which.
        exit_code: as of :class:`subprocess.Popen`; ``None`` if it hung.
        end: when it ended.
        faulted: when the fault hit it.
        steps: how many it has done without an error.
        failures: which exceptions it caught or died of.
        failed_before: how many of them before a launcher has started it again.
        result: what its program returned.
        log: the last lines that it printed.
    """

    rank: int
    exit_code: int | None = None
    end: float = 0.0
    faulted: float | None = None
    steps: int = 0
    failures: list[Failure] = field(default_factory=list)
    failed_before: int = 0
    result: Mapping[str, Any] | None = None
    log: str = ""

    @property
    def is_right(self) -> bool:
        has_failed = len(self.failures) > self.failed_before
        return self.exit_code == 0 and self.result is not None and not has_failed


@dataclass
class Run:
    """What became of all ranks.

    Attributes:
        way: eager, compiled, or a mode.
        start: when the ranks were started.
        ranks: of the first training, then of the others.
        left: processes that were still there after the ranks had ended, and files in TMPDIR.
        skipped: why it could not be run.
        launcher_code: of torchrun.
    """

    way: str
    start: float
    ranks: list[RankRun]
    left: list[str] = field(default_factory=list)
    skipped: str = ""
    launcher_code: int | None = None

    @property
    def fault_time(self) -> float:
        """When the first rank was hit; the start, if none was."""
        return min((r.faulted for r in self.ranks if r.faulted is not None), default=self.start)


def event(path: Path, **values: Any) -> None:
    """Append an event."""
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of events, also while it is written."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def events_path(directory: Path, rank: int) -> Path:
    """Where a rank writes."""
    return directory / f"rank-{rank}.jsonl"


def failure_of(error: BaseException) -> dict[str, Any]:
    """An exception and its chain, for :func:`event`."""
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


def add_events(run: RankRun, events: list[dict[str, Any]]) -> None:
    """Put what a rank has written into its record."""
    for item in events:
        if item["event"] == "start":
            run.failed_before = len(run.failures)
        elif item["event"] == "fault" and run.faulted is None:
            run.faulted = item["time"]
        elif item["event"] == "step":
            run.steps += 1
        elif item["event"] == "error":
            run.failures.append(
                Failure(tuple(item["kinds"]), tuple(item["texts"]), item["time"], item["step"])
            )
        elif item["event"] == "result":
            run.result = item["result"]
