"""Runs each part in a process of its own, within a time limit, and leaves none behind.

In that process: python -m gpu_checks.processes PART DIRECTORY
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from benches.processes import environment, last_words
from benches.results import Row
from gpu_checks.parts import Part
from gpu_checks.sites import ROWS, SITE, Result, Site
from testing.sessions import kill_marked, kill_session, start_session

MARK: Final = "GPU_PART"
"""Environment variable by which the processes of a part are known, whoever their parent is."""

STACKS_S: Final = 5.0
"""How long before it is killed the part's process says where it hangs, and ends."""


class PartProcess:
    """The process of a part, and those that it starts.

    Args:
        part: what runs.
        key: of its result.
        site: where it runs, but for its directory and deadline.
        cache: directory of compiled kernels, of this and other parts.
        logs: directory for what the processes print.
        limit_s: for the part.
    """

    def __init__(
        self, part: Part, *, key: str, site: Site, cache: Path, logs: Path, limit_s: float
    ) -> None:
        self._part, self._key, self._limit_s = part, key, limit_s
        self._start = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="gpu-part-"))
        deadline = self._start + max(1.0, limit_s - STACKS_S)
        self._site = replace(site, directory=str(self._directory), deadline=deadline)
        self._site.write(self._directory / SITE)
        self._log = logs / f"{part.name}.log"
        variables = environment(cache) | {MARK: str(self._directory)}
        variables |= self._site.place(1, timeout_s=0.0).variables
        command = [sys.executable, "-m", __name__, part.name, str(self._directory)]
        self._process = start_session(command, self._log, variables)

    def poll(self) -> Result | None:
        """The result, once the part is done or its time is over."""
        seconds = time.monotonic() - self._start
        code = self._process.poll()
        if code is None and seconds < self._limit_s:
            return None
        self._kill()
        failure = ""
        if seconds >= self._limit_s - STACKS_S:
            failure = f"not done after {self._limit_s:.0f} s" if code != 0 else ""
        elif code != 0:
            failure = f"it ended with {code}: {last_words(self._log)}"
        rows = self._rows()
        started = self._directory / "logs"
        if started.exists():
            shutil.copytree(started, self._log.with_suffix(""), dirs_exist_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        backend = self._site.backend
        return Result(self._part.name, self._key, backend, round(seconds, 1), rows, failure)

    def discard(self) -> None:
        """End the part without a result."""
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _kill(self) -> None:
        kill_session(self._process)
        # The ranks are sessions of their own.
        kill_marked(MARK, str(self._directory))

    def _rows(self) -> tuple[Row, ...]:
        path = self._directory / ROWS
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last one can be torn where the process was killed.
        rows = [Row(**json.loads(line)) for line in lines if line.endswith("\n")]
        return tuple({row.title: row for row in rows}.values())


# --- In the process of a part ------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Measure or train, and write each row as it is known; 1 if that cannot go on to the end."""
    name, directory = arguments[0], Path(arguments[1])
    site = Site.read(directory / SITE)
    # Says where it hangs; and a process whose tool is gone does not stay behind.
    faulthandler.dump_traceback_later(max(0.1, site.deadline - time.monotonic()), exit=True)
    status = 0
    try:
        _measure(part_of(site.catalog, name), site, directory)
    except Exception:  # noqa: BLE001  Whatever it is, it is the part's result.
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What would follow waits for process groups that others may have left.
    os._exit(status)


def part_of(catalog: str, name: str) -> Part:
    """A part by its name; of a catalog's ``PARTS``, or its ``PROBE``."""
    module = importlib.import_module(catalog)
    parts: list[Part] = [*module.PARTS, module.PROBE]
    (part,) = [part for part in parts if part.name == name]
    return part


def _measure(part: Part, site: Site, directory: Path) -> None:
    with (directory / ROWS).open("a") as file:

        def note(row: Row) -> None:
            print(json.dumps(asdict(row)), file=file, flush=True)

        if part.checks:
            from gpu_checks import trainings

            trainings.run(part, site, note)
        else:
            module, _, function = part.measure.partition(":")
            getattr(importlib.import_module(module), function)(site, note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
