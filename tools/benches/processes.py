"""The ranks of a method: processes that are started, asked, and ended whatever they do; and how one
answers.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NoReturn

from command_line import ROOT
from testing.sessions import kill_session, start_session

JOIN_S: Final = 120.0
"""At most, until torch has been imported on busy cores and the ranks have found each other."""


class RanksFailed(Exception):  # noqa: N818
    """Ranks cannot go on; its text says why."""


@dataclass(frozen=True)
class Place:
    """Where ranks run, and what they train.

    Attributes:
        directory: for caches.
        timeout_s: for anything that ranks are asked.
        cores: of each rank.
        model: its name.
        size: name of its size.
        host: address of rank 0.
        prefixes: for each rank, the command that starts another in the rank's network namespace;
            none without namespaces.
        variables: environment variables, for the network and torch.
        backend: of the process group.
        forwards: of a step, before one backward.
        shares_kernels: whether all methods have one compiler cache. None then starts as on a new
            machine, and none takes a compiled graph from it.
        worker: the module that ranks run.
        logs: directory; by default in ``directory``.
    """

    directory: Path
    timeout_s: float
    cores: tuple[tuple[int, ...], ...]
    model: str = ""
    size: str = "tiny"
    host: str = "127.0.0.1"
    prefixes: tuple[tuple[str, ...], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    backend: str = "gloo"
    forwards: int = 1
    shares_kernels: bool = False
    worker: str = "benches.rank"
    logs: Path | None = None

    @property
    def ranks(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class Assignment:
    """What one rank is to do.

    Attributes:
        place: where all ranks run.
        way: name of the method.
        cap_mb: of a bucket, in MiB; ``None`` is the method's default.
        rank: which rank.
    """

    place: Place
    way: str
    cap_mb: float | None
    rank: int

    @property
    def cores(self) -> tuple[int, ...]:
        """That its threads run on."""
        return self.place.cores[self.rank]


@dataclass(frozen=True)
class Started:
    """That a rank is ready to be measured.

    Attributes:
        seconds: of the wrapping in DDP and the first step.
        gradient_bytes: of all gradients.
        cpu_s: seconds of the process on CPUs in that, of all threads.
    """

    seconds: float
    gradient_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Checked:
    """A rank's gradients beside eager DDP's.

    Attributes:
        error: the largest difference of an element, over the largest element of its gradient.
        worst: the parameter where that is.
        missing: parameters with a gradient on one side only.
        compared: whether there was something to compare with.
    """

    error: float = 0.0
    worst: str = ""
    missing: tuple[str, ...] = ()
    compared: bool = True

    def in_words(self, tolerance: float) -> str:
        """What is wrong; empty if nothing is. The tolerance is of an element, over the largest of
        its gradient."""
        if not self.compared:
            return "compared with nothing: eager DDP failed"
        if self.missing:
            return f"gradients of other parameters than eager DDP's: {', '.join(self.missing)}"
        if not self.error <= tolerance:
            return f"the gradient of {self.worst} is off by {self.error:.1%}"
        return ""


@dataclass(frozen=True)
class Stepped:
    """Some steps of a rank.

    Attributes:
        seconds: of each step.
        cpu_s: seconds of the process on CPUs, of all threads, for all steps together.
    """

    seconds: tuple[float, ...]
    cpu_s: float


def cores_of(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Share the cores among the ranks; with fewer cores than ranks, ranks share them."""
    share = len(cores) // ranks
    if share == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return tuple(tuple(cores[rank * share : (rank + 1) * share]) for rank in range(ranks))


def environment(cache: Path, *, threads: int = 1, keeps_graphs: bool = False) -> dict[str, str]:
    """The environment of a process that trains, with its compiled kernels in a directory, and its
    compiled graphs where they are kept."""
    paths = [str(ROOT), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kept = {name: v for name, v in os.environ.items() if name != "FUSION_PASSES_DDP_FUSION"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": str(int(keeps_graphs)),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(keeps_graphs)),
        # Pools of compilers would compete with the ranks for their cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Torch tries this machine's vectors by six programs, which belong to a start alone.
        **({} if keeps_graphs else {"TORCHINDUCTOR_VEC_ISA_OK": "1"}),
        "TRANSFORMERS_VERBOSITY": "error",
    }


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path


@dataclass
class RankProcesses:
    """The ranks of a method, ready to be asked.

    Attributes:
        way: name of the method.
        place: where they run.
        cap_mb: of a bucket, in MiB; ``None`` is the method's default.

    Raises:
        RanksFailed: they cannot be started.
    """

    way: str
    place: Place
    cap_mb: float | None = None
    _ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            for rank in range(self.place.ranks):
                self._ranks.append(self._launch(rank))
            self._connect()
        except BaseException:
            self.kill()
            raise

    def ask(self, command: str, *values: object, timeout_s: float | None = None) -> list[Any]:
        """Have all ranks call a method of :class:`benches.rank.Rank`; what each answers.

        Raises:
            RanksFailed: a rank failed, ended, or did not answer in time. The others are killed.
        """
        if not self._ranks:
            raise RanksFailed("it has no processes any more")
        try:
            for rank in self._ranks:
                rank.connection.send((command, *values))
            return self._receive("done", timeout_s or self.place.timeout_s)
        except (RanksFailed, OSError) as error:
            self.kill()
            raise RanksFailed(str(error)) from error

    def kill(self) -> None:
        """Kill the ranks, and what they have started: each is a session of its own."""
        for rank in self._ranks:
            kill_session(rank.process)
            rank.connection.close()
        self._ranks.clear()

    def _launch(self, rank: int) -> _Rank:
        place = self.place
        cap = "" if self.cap_mb is None else f"-{self.cap_mb:g}"
        name = f"{place.model}-{self.way}{cap}-{rank}.log".replace(" ", "-").replace(":", ".")
        log = (place.logs or place.directory / "logs") / name
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        descriptor = str(theirs.fileno())
        prefix = place.prefixes[rank] if place.prefixes else ()
        command = [*prefix, sys.executable, "-m", place.worker, descriptor]
        with theirs:
            variables, kept = self._environment(), [theirs.fileno()]
            process = start_session(command, log, variables, appends=True, pass_fds=kept)
            connection = Connection(ours.detach())
            # While this process has the other end too: that one may have died already.
            connection.send(Assignment(place, self.way, self.cap_mb, rank))
        return _Rank(process, connection, log)

    def _environment(self) -> dict[str, str]:
        place = self.place
        # A cap changes no kernel, only what is launched. The key of a graph lacks the names of
        # torch's fusion passes: a shared cache with graphs in it would give one way another's.
        owner = "all" if place.shares_kernels else self.way
        cache = place.directory / "caches" / f"{place.model}-{owner}".replace(" ", "-")
        threads, keeps = len(place.cores[0]), not place.shares_kernels
        return environment(cache, threads=threads, keeps_graphs=keeps) | {**place.variables}

    def _connect(self) -> None:
        (port,) = self._receive("port", JOIN_S, self._ranks[:1])
        for rank in self._ranks[1:]:
            rank.connection.send(port)
        self._receive("done", JOIN_S)

    def _receive(
        self, kind: str, timeout_s: float, ranks: Sequence[_Rank] | None = None
    ) -> list[Any]:
        ranks = self._ranks if ranks is None else ranks
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(ranks):
            waiting = {
                rank.connection: index for index, rank in enumerate(ranks) if index not in answers
            }
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(str(index) for index in waiting.values())
                raise RanksFailed(f"rank {silent} has not answered for {timeout_s:g} s")
            for connection in ready:
                index = waiting[connection]  # type: ignore[index]
                answers[index] = self._answer(ranks[index], index, kind)
        return [answers[index] for index in range(len(ranks))]

    def _answer(self, rank: _Rank, index: int, kind: str) -> Any:
        try:
            told, value = rank.connection.recv()
        except (EOFError, OSError):
            code = rank.process.wait()
            raise RanksFailed(f"rank {index} ended with {code}: {last_words(rank.log)}") from None
        if told != kind:
            raise RanksFailed(f"rank {index}: {value}")
        return value


def last_words(log: Path) -> str:
    """The last line that a process has printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def serve(arguments: list[str], kind: Callable[[Assignment, Connection], Any]) -> NoReturn:
    """In a rank: make what has its commands as methods, and answer until the process is killed, or
    one has failed, which is reported."""
    connection = Connection(int(arguments[0]))
    assignment: Assignment = connection.recv()
    # The command that is interrupted kills its ranks; without it they end by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # Before torch starts threads.
    os.sched_setaffinity(0, assignment.cores)
    try:
        rank = kind(assignment, connection)
        connection.send(("done", None))
        while True:
            name, *values = connection.recv()
            connection.send(("done", getattr(rank, name)(*values)))
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the method's result.
        traceback.print_exc()
        with contextlib.suppress(OSError):  # Nobody listens any more.
            connection.send(("failed", f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # What would follow waits for process groups that others may have left.
    os._exit(1)
