"""Runs a scenario in its own processes, all of which it ends, and records how each rank ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fault_runs.records import RankRecord, RunRecord, add_events, events_path, read_events
from fault_runs.scenarios import MODES, PEERS, Scenario, Way
from testing.sessions import Sessions, environment

POLL_S = 0.05
START_S = 240.0
"""Time limit until the fault, in seconds: cold compiles on busy cores."""

LEAVE_S = 3.0
"""Time for which processes that the ranks started may outlive them, in seconds."""

STOCK_FILES = ("torchinductor_", "torchelastic_")
"""Prefixes of directories that stock Inductor leaves in TMPDIR, and torchrun for its logs."""

STACK_S = 0.5
TAIL_LINES = 12

FILLING: Mapping[str, object] = {"steps": 2, "modules": 1, "goes_on": None, "pause_s": 0}
"""Options of a run that fills a cache."""


def run_scenario(scenario: Scenario, way: Way, runs: Path) -> RunRecord:
    """Run a scenario one way. ``runs``: directory for the files and caches of all runs."""
    directory = Path(tempfile.mkdtemp(prefix=f"{scenario.name}-", dir=runs))
    cache = directory / "cache"
    if scenario.warm:
        shutil.copytree(_filled_cache(scenario, way, runs), cache)
    else:
        cache.mkdir()
    if scenario.prepare:
        scenario.prepare(cache)
    try:
        return _Processes(scenario, way, directory, cache).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _filled_cache(scenario: Scenario, way: Way, runs: Path) -> Path:
    """The cache of a run without a fault, which all scenarios with the same program share."""
    program = scenario.program.partition(":")[2]
    chosen = [str(scenario.options.get(name) or "plain") for name in ("hook", "graph")]
    cache = runs / "-".join(["filled", program, *chosen, str(scenario.ranks), way])
    if cache.exists() or way == "eager":
        cache.mkdir(exist_ok=True)
        return cache
    calm = Scenario(
        scenario.name,
        scenario.program,
        {**scenario.options, **FILLING},
        ranks=scenario.ranks,
        group_timeout_s=START_S,
        limit_s=600.0,
    )
    directory = Path(tempfile.mkdtemp(prefix="filling-", dir=runs))
    filled = directory / "cache"
    filled.mkdir()
    run = _Processes(calm, way, directory, filled).run()
    if not all(rank.is_right for rank in run.ranks):
        logs = "\n".join(rank.log for rank in run.ranks)
        raise RuntimeError(f"{scenario.name}, {way}: a run without a fault failed\n{logs}")
    filled.replace(cache)
    return cache


@dataclass
class _Rank:
    """The runner's handle of a rank.

    Attributes:
        record: record of the rank.
        directory: directory of its training.
        process: its process; ``None`` under torchrun.
        end: time at which it ended; ``None`` while it runs.
    """

    record: RankRecord
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    end: float | None = None

    def times_of(self, kind: str) -> list[float]:
        """Times of the rank's events of a kind."""
        path = events_path(self.directory, self.record.rank)
        return [item["time"] for item in read_events(path) if item["event"] == kind]


class _Processes:
    """The processes of a scenario that runs one way."""

    def __init__(self, scenario: Scenario, way: Way, directory: Path, cache: Path) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        self.scenario, self.way = scenario, way
        self._directory, self._cache = directory, cache
        self._temporary = directory / "tmp"
        self._temporary.mkdir()
        # All runs share the directory in which Inductor keeps precompiled headers. Compiling these
        # takes 10 s, in which the other ranks wait.
        headers = directory.parent / "headers"
        headers.mkdir(exist_ok=True)
        (self._temporary / Path(default_cache_dir()).name).symlink_to(headers)
        self._sessions = Sessions()
        self._ranks: list[_Rank] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._interrupted: float | None = None
        self._start_time = time.time()

    def run(self) -> RunRecord:
        """Run until all ranks end or the time limit is over. Kill all processes in any case."""
        with self._sessions:
            self._start()
            while not self._is_done():
                if self._is_late():
                    self._say_stacks()
                    break
                time.sleep(POLL_S)
            left = self._left_processes()
        origin = self._fault_time() or self._start_time
        for rank in self._ranks:
            rank.record.end_s = (rank.end or time.time()) - origin
            rank.record.is_hit = self._interrupted is not None
            path = events_path(rank.directory, rank.record.rank)
            add_events(rank.record, read_events(path), origin)
            rank.record.log = self._tail(rank)
        files = sorted(path.name for path in self._temporary.iterdir())
        left += [f"file {name}" for name in files if not name.startswith(STOCK_FILES)]
        return RunRecord(self.way, [rank.record for rank in self._ranks], left)

    def _start(self) -> None:
        for training in range(self.scenario.trainings):
            directory = self._directory / f"training-{training}"
            directory.mkdir()
            new = [_Rank(RankRecord(rank), directory) for rank in range(self.scenario.ranks)]
            self._ranks += new
            if self.scenario.launcher == "torchrun":
                self._start_torchrun(directory)
                continue
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]  # A free port.
            for rank in new:
                rank.process = self._start_rank(rank, port)

    def _start_rank(self, rank: _Rank, port: int) -> subprocess.Popen[bytes]:
        number = str(rank.record.rank)
        places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": str(self.scenario.ranks)}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "fault_runs.rank", *self._arguments(rank.directory)]
        log = rank.directory / f"rank-{number}.log"
        return self._sessions.start(command, log, self._environment(rank.record.rank) | places)

    def _start_torchrun(self, directory: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.scenario.ranks}", "--max-restarts=1"]
        command += ["--module", "fault_runs.rank", *self._arguments(directory)]
        log = directory / "launcher.log"
        self._launcher = self._sessions.start(command, log, self._environment(-1))

    def _arguments(self, directory: Path) -> list[str]:
        fault = self.scenario.fault
        values = {
            "fault": dataclasses.asdict(fault) if fault else None,
            "options": dict(self.scenario.options),
            "group_timeout_s": self.scenario.group_timeout_s,
        }
        return [self.scenario.program, self.way, str(directory), json.dumps(values)]

    def _environment(self, rank: int) -> dict[str, str]:
        variables = environment(self._cache, keeps_graphs=True) | {
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # Otherwise torch compiles six programs to test it.
        }
        if self.way not in PEERS:
            is_mode = self.way in MODES  # Otherwise the program sets the options.
            variables["FUSION_PASSES_DDP_FUSION"] = self.way if is_mode else "concat"
        own = self.scenario.rank_environment.get(rank, {})
        own = {name: text.format(directory=self._directory) for name, text in own.items()}
        return variables | dict(self.scenario.environment) | own

    def _is_done(self) -> bool:
        """Poll each process, and return whether all have ended."""
        if self._launcher is not None:
            self._interrupt_launcher()
        for rank in self._ranks:
            process = self._launcher or rank.process
            assert process is not None
            if rank.end is None and (code := process.poll()) is not None:
                rank.record.exit_code, rank.end = code, time.time()
        running = [rank for rank in self._ranks if rank.end is None]
        self._kill_stopped(running)
        return not running

    def _kill_stopped(self, running: list[_Rank]) -> None:
        """Kill a rank that is stopped for good, once all other ranks have ended."""
        fault = self.scenario.fault
        if fault is None or fault.action != "stop" or fault.continue_s is not None:
            return
        if all(rank.times_of("fault") for rank in running):
            for rank in running:
                assert rank.process is not None
                rank.process.kill()

    def _interrupt_launcher(self) -> None:
        at = self.scenario.interrupt_step
        if at is None or self._interrupted is not None:
            return
        if max(len(rank.times_of("step")) for rank in self._ranks) >= at:
            # To all processes, as a terminal does on Ctrl-C.
            self._sessions.send(signal.SIGINT)
            self._interrupted = time.time()

    def _fault_time(self) -> float | None:
        """Time at which the fault first hit a rank, or the launcher was interrupted."""
        times = [time for rank in self._ranks for time in rank.times_of("fault")]
        times += [] if self._interrupted is None else [self._interrupted]
        return min(times, default=None)

    def _is_late(self) -> bool:
        since = self._fault_time()
        if since is not None:
            return time.time() - since > self.scenario.limit_s
        return time.time() - self._start_time > max(START_S, self.scenario.limit_s)

    def _say_stacks(self) -> None:
        """Make each rank that hangs write its stacks."""
        launcher = None if self._launcher is None else self._launcher.pid
        self._sessions.send(signal.SIGCONT, signal.SIGUSR1, but=launcher)
        time.sleep(STACK_S)

    def _left_processes(self) -> list[str]:
        """Processes that are still running after all ranks have ended."""
        if any(rank.end is None for rank in self._ranks):
            return []
        return [f"process {_command_of(pid)}" for pid in self._sessions.left_after(LEAVE_S)]

    def _tail(self, rank: _Rank) -> str:
        """The last lines that a rank printed, and the stacks that it wrote."""
        number = rank.record.rank
        texts = []
        for name in (f"rank-{number}.log", "launcher.log", f"stacks-{number}.txt"):
            path = rank.directory / name
            if path.exists():
                texts += path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(texts)


def _command_of(pid: int) -> str:
    """The command of a process, or its id if the process has ended."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace")[:200]
    return str(pid)
