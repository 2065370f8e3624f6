"""Runs each test in processes of its own, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from testing.side_by_side import run_side_by_side
from torch_tests_run.comparing import OFF, Outcome, Run, last_error
from torch_tests_run.worker import FLAG, RESULT, preload, run_test

STACKS_S = 10.0
"""How long before a run is killed torch's own time limit prints where the ranks hang."""

TAIL = 4000
"""Characters of the log that an error is looked for in, if a test died without a word."""


class RunProcesses:
    """The processes of one run, forked from this one, which has imported torch.

    Args:
        run: the test and its variant.
        ranks: how many processes the test needs.
        log: file for what they print.
        timeout_s: for the run.
    """

    def __init__(self, run: Run, ranks: int, *, log: Path, timeout_s: float) -> None:
        self.run = run
        self._log = log
        self._timeout_s = timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="torch-tests-"))
        self._start = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            self._be_the_test(ranks)

    def _be_the_test(self, ranks: int) -> None:
        """Run the test in the forked process and end it."""
        status = 1
        try:
            # A session of its own, which the ranks stay in: killing it reaches all of them.
            os.setsid()
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, sys.stdout.fileno())
            os.dup2(output, sys.stderr.fileno())
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ |= _environment(self.run, ranks, self._directory)
            tempfile.tempdir = None
            is_compiled = self.run.models == "compiled"
            run_test(self.run.test, compiled=is_compiled, directory=self._directory)
            status = 0
        except BaseException:  # noqa: BLE001 - nothing of the parent's may run in the child
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def poll(self) -> Outcome | None:
        """The outcome, once the run is done or its time is over."""
        seconds = time.monotonic() - self._start
        is_late = seconds >= self._timeout_s
        if not self._has_ended() and not is_late:
            return None
        self.end()
        outcome = self._outcome(is_late, round(seconds, 1))
        shutil.rmtree(self._directory, ignore_errors=True)
        return outcome

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is not None

    def _outcome(self, is_late: bool, seconds: float) -> Outcome:
        buckets = self._directory / "buckets-0"
        fused = int(buckets.read_text() or 0) if buckets.exists() else 0
        if is_late or seconds >= self._timeout_s - STACKS_S:
            return Outcome("timed out", f"not done after {self._timeout_s:g} s", fused, seconds)
        result = self._directory / RESULT
        if not result.exists():
            tail = self._log.read_text(errors="replace")[-TAIL:]
            return Outcome("failed", f"ended without a result: {last_error(tail)}", fused, seconds)
        data = json.loads(result.read_text())
        with self._log.open("a") as log:
            log.write(f"\n{data['kind']}\n{data['text']}\n")
        return Outcome(data["kind"], last_error(data["text"]), fused, seconds)

    def end(self) -> None:
        """Kill what still runs: the test's process and the ranks."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._status is None:
            # It may not have got to its own session yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._status = os.waitpid(self._pid, 0)[1]

    def discard(self) -> None:
        """End the run without an outcome."""
        self.end()
        shutil.rmtree(self._directory, ignore_errors=True)


class Processes:
    """Runs tests, some at a time.

    Args:
        logs: directory for what they print.
        timeout_s: for each run.
        jobs: how many run at a time.
    """

    def __init__(self, logs: Path, timeout_s: float, jobs: int) -> None:
        self._logs = logs
        self._timeout_s = timeout_s
        self._jobs = jobs

    def run(self, runs: Mapping[Run, int], on_outcome: Callable[[Run, Outcome], None]) -> None:
        """Run tests; kill what runs if it is interrupted.

        Args:
            runs: each with its number of ranks, in this order.
            on_outcome: called with each run as it is done.
        """
        if not runs:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._prepared():
            run_side_by_side(
                runs, lambda run: self._start(run, runs[run]), on_outcome, jobs=self._jobs
            )

    def _start(self, run: Run, ranks: int) -> RunProcesses:
        log = self._logs / f"{run.test}-{run.models}-{run.mode}.log"
        return RunProcesses(run, ranks, log=log, timeout_s=self._timeout_s)

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Import torch under the environment that all runs have."""
        limit_s = int(max(1, self._timeout_s - STACKS_S))
        with tempfile.TemporaryDirectory(prefix="torch-tests-cache-") as cache:
            variables = {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, **_ENVIRONMENT}
            variables["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(limit_s)
            before = dict(os.environ)
            os.environ |= variables
            os.environ.pop(FLAG, None)
            preload()
            try:
                yield
            finally:
                os.environ.clear()
                os.environ |= before


_ENVIRONMENT = {
    "BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Kernels are shared between runs, for time; graphs are not: each run runs the passes.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
"""Of all runs; before torch is imported."""


def _environment(run: Run, ranks: int, directory: Path) -> dict[str, str]:
    flag = {} if run.mode == OFF else {FLAG: run.mode}
    return flag | {
        "WORLD_SIZE": str(ranks),
        "TMPDIR": str(directory),
    }
