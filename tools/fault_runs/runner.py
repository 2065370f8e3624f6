"""Runs a scenario in processes of its own, and leaves none behind. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fault_runs import records
from fault_runs.machine import MARK, command_of, free_port, marked, stock_cache_name
from fault_runs.scenarios import MODES, Fault, Scenario, Way
from testing.sessions import start_session

ROOT = Path(__file__).resolve().parent.parent.parent

POLL_S = 0.05
START_S = 240.0
"""At most, until the fault: cold compiles on busy cores."""

LEAVE_S = 3.0
"""How long what the ranks have started may outlive them."""

STOCK_FILES = ("torchinductor_", "torchelastic_")
"""Directories that stock Inductor and torchrun, for its logs, leave in TMPDIR."""

STACK_S = 0.5
TAIL_LINES = 12


@dataclass
class _Rank:
    """One process, as the runner sees it; under torchrun, of the last life that has started."""

    record: records.RankRun
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    is_stopped: bool = False
    is_continued: bool = False

    @property
    def events(self) -> list[dict[str, object]]:
        return records.read_events(records.events_path(self.directory, self.record.rank))

    def faulted(self) -> float | None:
        times = [item["time"] for item in self.events if item["event"] == "fault"]
        return float(str(times[0])) if times else None


class RunProcesses:
    """The processes of one scenario, one way.

    Args:
        scenario: what runs.
        way: eager, compiled, or a mode.
        directory: for what the ranks write; made.
        cache: Inductor's.
        headers: Inductor's other one, for the headers that it compiles: of all runs together, since
            that takes 10 s, in which the other ranks wait.
        without_fault: for a run that fills the cache.
    """

    def __init__(
        self,
        scenario: Scenario,
        way: Way,
        *,
        directory: Path,
        cache: Path,
        headers: Path,
        without_fault: bool = False,
    ) -> None:
        self.scenario, self.way = scenario, way
        self.fault: Fault | None = None if without_fault else scenario.fault
        self._without_fault = without_fault
        self._directory, self._cache = directory, cache
        self._temporary = directory / "tmp"
        self._temporary.mkdir(parents=True)
        (self._temporary / stock_cache_name()).symlink_to(headers)
        self._mark = f"{os.getpid()}-{directory.name}-{time.monotonic_ns()}"
        self._ranks: list[_Rank] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._launcher_end: float | None = None
        self._is_interrupted = False
        self.start = time.time()

    def run(self) -> records.Run:
        """Run to the end; end all processes whatever happens."""
        try:
            self._start()
            while not self._is_done():
                if self._is_late():
                    self._say_stacks()
                    break
                time.sleep(POLL_S)
            left = self._left_processes()
        finally:
            self._end()
        for rank in self._ranks:
            records.add_events(rank.record, list(rank.events))
            rank.record.log = self._tail(rank)
        files = sorted(path.name for path in self._temporary.iterdir())
        left += [f"file {name}" for name in files if not name.startswith(STOCK_FILES)]
        code = self._launcher.returncode if self._launcher else None
        ranks = [rank.record for rank in self._ranks]
        return records.Run(self.way, self.start, ranks, left, launcher_code=code)

    def _start(self) -> None:
        trainings = 1 if self._without_fault else self.scenario.trainings
        for training in range(trainings):
            directory = self._directory / f"training-{training}"
            directory.mkdir()
            ranks = range(self.scenario.ranks)
            new = [_Rank(records.RankRun(rank), directory) for rank in ranks]
            self._ranks += new
            if self.scenario.launcher == "torchrun":
                self._start_torchrun(directory)
            else:
                port = free_port()
                for rank in new:
                    rank.process = self._start_rank(rank, port)

    def _start_rank(self, rank: _Rank, port: int) -> subprocess.Popen[bytes]:
        number = rank.record.rank
        places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": self.scenario.ranks}
        variables = self._environment(number) | {k: str(v) for k, v in places.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "fault_runs.rank", *self._arguments(rank.directory)]
        return start_session(command, rank.directory / f"rank-{number}.log", variables)

    def _start_torchrun(self, directory: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.scenario.ranks}", *self.scenario.launcher_options]
        command += ["--module", "fault_runs.rank", *self._arguments(directory)]
        log = directory / "launcher.log"
        self._launcher = start_session(command, log, self._environment(-1))

    def _arguments(self, directory: Path) -> list[str]:
        values = {
            "fault": asdict(self.fault) if self.fault else None,
            "options": dict(self.scenario.options),
            "group_timeout_s": START_S if self._without_fault else self.scenario.group_timeout_s,
        }
        return [self.scenario.program, self.way, str(directory), json.dumps(values)]

    def _environment(self, rank: int) -> dict[str, str]:
        variables = {k: v for k, v in os.environ.items() if k != "FUSION_PASSES_DDP_FUSION"}
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [path for path in (*given, str(ROOT), str(ROOT / "tools")) if path]
        variables |= {
            MARK: self._mark,
            "PYTHONPATH": os.pathsep.join(paths),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self._cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # No trial, which compiles six programs.
        }
        if self.way in MODES:
            variables["FUSION_PASSES_DDP_FUSION"] = self.way
        if self._without_fault:
            return variables
        return variables | dict(self.scenario.environment) | self._of_rank(rank)

    def _of_rank(self, rank: int) -> dict[str, str]:
        values = self.scenario.rank_environment.get(rank, {})
        return {name: text.format(directory=self._directory) for name, text in values.items()}

    def _is_done(self) -> bool:
        """Look at each process once; continue and end the stopped ones."""
        if self._launcher is not None:
            self._interrupt_launcher()
            if self._launcher.poll() is None:
                return False
            for rank in self._ranks:
                rank.record.end = self._launcher_end = self._launcher_end or time.time()
                rank.record.exit_code = self._launcher.returncode
            return True
        for rank in self._ranks:
            assert rank.process is not None
            if rank.record.exit_code is None and (code := rank.process.poll()) is not None:
                rank.record.exit_code, rank.record.end = code, time.time()
        running = [rank for rank in self._ranks if rank.record.exit_code is None]
        self._continue_stopped(running)
        return not running

    def _continue_stopped(self, running: list[_Rank]) -> None:
        """Continue ranks whose time has come; kill one that is never to, once it is alone."""
        if self.fault is None or self.fault.action != "stop":
            return
        for rank in running:
            since = rank.faulted()
            if since is None or rank.is_continued or rank.process is None:
                continue
            rank.is_stopped = True
            wait_s = self.fault.continue_s
            if wait_s is not None and time.time() - since >= wait_s:
                os.kill(rank.process.pid, signal.SIGCONT)
                rank.is_continued, rank.is_stopped = True, False
        if running and all(rank.is_stopped for rank in running) and self.fault.continue_s is None:
            for rank in running:
                assert rank.process is not None
                rank.process.kill()

    def _interrupt_launcher(self) -> None:
        at = self.scenario.interrupt_step
        if at is None or self._is_interrupted or self._without_fault or self._launcher is None:
            return
        done = [sum(item["event"] == "step" for item in rank.events) for rank in self._ranks]
        if max(done) >= at:
            # As a terminal does: to all processes of the foreground.
            for pid in marked(self._mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            self._is_interrupted = True
            for rank in self._ranks:
                rank.record.faulted = time.time()

    def _is_late(self) -> bool:
        times = [t for rank in self._ranks if (t := rank.faulted() or rank.record.faulted)]
        now = time.time()
        if times:
            return now - min(times) > self.scenario.limit_s
        return now - self.start > max(START_S, self.scenario.limit_s)

    def _say_stacks(self) -> None:
        """Let each rank that hangs write where it is."""
        for pid in marked(self._mark):
            if self._launcher is None or pid != self._launcher.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_S)

    def _left_processes(self) -> list[str]:
        """What still runs although all ranks have ended."""
        if any(rank.record.exit_code is None for rank in self._ranks):
            return []
        deadline = time.monotonic() + LEAVE_S
        while (pids := list(marked(self._mark))) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [f"process {command_of(pid)}" for pid in pids]

    def _end(self) -> None:
        """Kill what still runs: ranks, launchers, and what these have started."""
        processes = [r.process for r in self._ranks if r.process is not None]
        processes += [self._launcher] if self._launcher is not None else []
        while pids := list(marked(self._mark)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in processes:
                process.poll()
            time.sleep(POLL_S)
        for process in processes:
            process.kill()
            process.wait()

    def _tail(self, rank: _Rank) -> str:
        number = rank.record.rank
        texts = []
        for name in (f"rank-{number}.log", "launcher.log", f"stacks-{number}.txt"):
            path = rank.directory / name
            if path.exists():
                texts += path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(texts)
