"""Runs each part in its own process with a time limit, keeps its results, and leaves no process
behind. That process runs ``python -m gpu_checks.processes DIRECTORY``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import pkgutil
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from benches.results import Row
from gpu_checks import trainings
from gpu_checks.parts import Part
from gpu_checks.sites import Site
from testing.sessions import Sessions, environment, last_words, wait_for

TASK: Final = "task.pickle"
"""File in a part's directory: the part and its site."""

ROWS: Final = "rows.jsonl"
"""File with the recorded rows, one per line."""

STACKS_S: Final = 5.0
"""Time before the part's process is killed at which it writes where it hangs, and ends, in
seconds."""


@dataclass(frozen=True)
class Result:
    """The result of a part.

    Attributes:
        part: name of the part.
        backend: backend of its process group.
        seconds: duration.
        rows: rows of its table.
        failure: why it did not finish; empty if it did.
    """

    part: str
    backend: str
    seconds: float
    rows: tuple[Row, ...] = ()
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and bool(self.rows) and all(row.is_right for row in self.rows)

    def write(self, directory: Path) -> None:
        """Write it to a directory."""
        (directory / f"{self.part}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def run_part(part: Part, site: Site, *, work: Path, logs: Path, limit_s: float) -> Result:
    """Run a part with a time limit, and kill all processes that it leaves. All parts share the
    kernels in the directory ``work``."""
    start = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="part-", dir=work))
    deadline = start + max(1.0, limit_s - STACKS_S)
    site = replace(site, directory=str(directory), deadline=deadline)
    (directory / TASK).write_bytes(pickle.dumps((part, site)))
    log = logs / f"{part.name}.log"
    log.unlink(missing_ok=True)
    variables = environment(work / "kernels") | {**site.place(1, timeout_s=0.0).variables}
    command = [sys.executable, "-m", __name__, str(directory)]
    with Sessions(str(directory)) as sessions:
        code = wait_for(sessions.start(command, log, variables), limit_s)
    seconds, failure = time.monotonic() - start, ""
    if code is None or (code != 0 and seconds >= limit_s - STACKS_S):
        failure = f"not done after {limit_s:.0f} s"
    elif code != 0:
        failure = f"it ended with {code}: {last_words(log)}"
    rows = _rows(directory / ROWS)
    if (started := directory / "logs").exists():
        shutil.copytree(started, log.with_suffix(""), dirs_exist_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    return Result(part.name, site.backend, round(seconds, 1), rows, failure)


def kill_parts(work: Path) -> None:
    """End the processes of all parts in this directory."""
    for directory in work.glob("part-*"):
        Sessions(str(directory)).kill()


def _rows(path: Path) -> tuple[Row, ...]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # The last line can be incomplete if the process was killed.
    rows = [Row(**json.loads(line)) for line in lines if line.endswith("\n")]
    return tuple({row.title: row for row in rows}.values())


# --- In the process of a part ------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run a part in this process, and write each row as soon as it is known. The exit status is 1
    if the part raises."""
    directory = Path(arguments[0])
    part: Part
    site: Site
    part, site = pickle.loads((directory / TASK).read_bytes())
    # Write the stacks and exit shortly before the time limit, even if the tool has ended.
    faulthandler.dump_traceback_later(max(0.1, site.deadline - time.monotonic()), exit=True)
    status = 0
    with (directory / ROWS).open("a") as file:

        def note(row: Row) -> None:
            print(json.dumps(asdict(row)), file=file, flush=True)

        try:
            if part.checks:
                trainings.run(part, site, note)
            else:
                pkgutil.resolve_name(part.measure)(site, note)
        except Exception:  # noqa: BLE001  Any exception is the part's result.
            traceback.print_exc()
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for process groups whose other ranks may have ended.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
