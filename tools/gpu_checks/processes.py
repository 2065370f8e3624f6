"""Runs each part in processes of its own, within a time limit, and leaves none behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_checks.machine import ROOT, Machine
from gpu_checks.parts import Part
from gpu_checks.results import Result, Row
from gpu_checks.sharing import DIRECTORY
from gpu_checks.sites import ROWS, SITE, Site
from testing.scenarios.outcomes import judge
from testing.scenarios.ranks import read_reports
from testing.sessions import kill_marked, kill_session, start_session

WORKER = "gpu_checks.worker"
POLL_S = 0.1

MARK = "GPU_CHECKS_PART"
"""Environment variable by which the processes of a part are known, whoever their parent is."""

STACKS_S = 5.0
"""How long before a part is killed its processes say where they hang, and end."""

TAIL_LINES = 60

STAY_S = 10.0
"""How long a rank may go on after another has failed; what it waits for will not come."""


class PartProcesses:
    """The processes of a part.

    Args:
        part: what runs.
        machine: for the key of its result.
        site: where it runs, but for its directory and deadline.
        cache: directory of compiled kernels, of this and other parts.
        logs: directory for what the processes print.
        limit_s: for the part.
    """

    def __init__(
        self, part: Part, *, machine: Machine, site: Site, cache: Path, logs: Path, limit_s: float
    ) -> None:
        self.part = part
        self._machine = machine
        self._limit_s = limit_s
        self._start = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="gpu-part-"))
        deadline = self._start + max(1.0, limit_s - STACKS_S)
        self._site = replace(site, directory=str(self._directory), deadline=deadline)
        self._site.write(self._directory / SITE)
        self._logs = [logs / f"{part.name}-{rank}.log" for rank in range(part.ranks)]
        self._failed_at: float | None = None
        self._ranks = [self._launch(rank, cache) for rank in range(part.ranks)]

    def _launch(self, rank: int, cache: Path) -> subprocess.Popen[bytes]:
        variables = environment(str(self._directory), cache)
        if self._site.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif self.part.joined > self._machine.count:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        sharing = self._site.sharing
        if sharing.mps and self.part.joined > 1:
            variables[DIRECTORY] = sharing.mps
        if sharing.apart and self.part.ranks > 1:
            variables["NCCL_HOSTID"] = f"rank-{rank}"
        command = [sys.executable, "-m", WORKER, self.part.name, str(self._directory), str(rank)]
        return start_session(command, self._logs[rank], variables)

    def poll(self) -> Result | None:
        """The result, once the part is done or its time is over."""
        seconds = time.monotonic() - self._start
        codes = [rank.poll() for rank in self._ranks]
        if any(code is None for code in codes) and seconds < self._limit_s:
            if any(codes) and self._failed_at is None:
                self._failed_at = seconds
            if self._failed_at is None or seconds < self._failed_at + STAY_S:
                return None
        late = seconds >= self._limit_s - STACKS_S
        fate = f"not done after {self._limit_s:.0f} s" if late else ""
        failure = "" if all(code == 0 for code in codes) else fate or self._last_words(codes)
        self._kill()
        rows = self._judged(fate) if self.part.checks else self._noted()
        started = self._directory / "logs"
        if started.exists():
            shutil.copytree(started, self._logs[0].with_suffix(""), dirs_exist_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        # What is wrong with a training stands in its row.
        failure = "" if any(not row.is_right for row in rows) else failure
        key, backend = self._machine.key, self._site.backend
        return Result(self.part.name, key, backend, round(seconds, 1), tuple(rows), failure)

    def discard(self) -> None:
        """End the part without a result."""
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _kill(self) -> None:
        for rank in self._ranks:
            kill_session(rank)
        kill_marked(MARK, str(self._directory))

    def _last_words(self, codes: Sequence[int | None]) -> str:
        """Of the first rank that failed."""
        rank = next(rank for rank, code in enumerate(codes) if code != 0)
        lines = [line for line in tail(self._logs[rank]).splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "it said nothing"
        return f"rank {rank} ended with {codes[rank]}: {said}"

    def _judged(self, fate: str) -> list[Row]:
        rows: list[Row] = []
        stopped = ""
        for number, check in enumerate(self.part.checks_on(self._site.device)):
            reports = read_reports(self._directory / str(number), self.part.ranks)
            if stopped and None in reports:
                rows.append(Row(check.title, False, f"not run, because of {stopped}"))
                continue
            log = "\n".join(tail(log) for log in self._logs)
            outcome = judge(check.scenario, reports, fate=fate, log=log)
            is_right = outcome.kind in ("equal", *check.also_right)
            words = f"{outcome.kind}: {outcome.words}" if outcome.kind != "equal" else outcome.words
            rows.append(Row(check.title, is_right, words))
            # The same as in the worker, which ends where only some ranks have failed.
            fates = {report and bool(report.eager or report.fused) for report in reports}
            if None in fates or len(fates) > 1:
                stopped = stopped or f'"{check.title}"'
        return rows

    def _noted(self) -> list[Row]:
        path = self._directory / ROWS
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last one can be torn where the process was killed.
        rows = [Row(**json.loads(line)) for line in lines if line.endswith("\n")]
        return list({row.title: row for row in rows}.values())


def run_parts(
    parts: Sequence[Part],
    start: Callable[[Part], PartProcesses | None],
    *,
    jobs: int,
    on_result: Callable[[Part, Result], None],
) -> None:
    """Run parts, up to ``jobs`` at a time; kill what runs if it is interrupted.

    Args:
        parts: in this order.
        start: starts one, unless there is no time left for it.
        jobs: how many run at a time.
        on_result: called with each as it is done.
    """
    waiting, running = list(parts), list[PartProcesses]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                started = start(waiting.pop(0))
                running += [started] if started else []
            for processes in list(running):
                result = processes.poll()
                if result is not None:
                    running.remove(processes)
                    on_result(processes.part, result)
            time.sleep(POLL_S)
    finally:
        for processes in running:
            processes.discard()


def environment(mark: str, cache: Path) -> dict[str, str]:
    """The environment of processes that train.

    Kernels are shared between parts, for time; graphs are not: each part runs the passes.

    Args:
        mark: by which :func:`testing.sessions.kill_marked` knows the processes.
        cache: directory of compiled kernels.
    """
    variables = {
        name: value for name, value in os.environ.items() if name != "FUSION_PASSES_DDP_FUSION"
    }
    paths = [str(ROOT), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return variables | {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Torch takes this machine's vectors without a trial, which compiles six programs.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


def tail(log: Path) -> str:
    """The end of what processes have printed."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
