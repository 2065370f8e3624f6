"""The processes of a row: started, asked, and ended whatever they do."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench_steps.rows import Assignment, Row
from testing.sessions import kill_session, start_session

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = "bench_steps.rank"

JOIN_S = 120.0
"""At most, until torch has been imported on busy cores and the ranks have found each other."""

END_S = 10.0
TAIL_LINES = 40


class RowFailed(Exception):  # noqa: N818
    """A row cannot be measured; its text says why."""


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        model: name of the model.
        size: name of its size.
        cores: of each rank.
        host: address of rank 0.
        prefixes: for each rank, the command that starts another in the rank's network namespace;
            empty without one.
        variables: environment variables, for the network and torch.
        directory: for logs and caches.
        timeout_s: for anything that ranks are asked.
        forwards: of a step, before one backward.
        shares_kernels: whether all rows have one compiler cache. No row then starts as on a new
            machine, and none takes a compiled graph from it.
        worker: the module that ranks run; by default :data:`WORKER`.
    """

    model: str
    size: str
    cores: tuple[tuple[int, ...], ...]
    host: str
    prefixes: tuple[tuple[str, ...], ...]
    variables: dict[str, str]
    directory: Path
    timeout_s: float
    forwards: int = 1
    shares_kernels: bool = False
    worker: str = ""

    @property
    def ranks(self) -> int:
        return len(self.cores)


def cores_of(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Share the cores among the ranks; with fewer cores than ranks, ranks share them."""
    share = len(cores) // ranks
    if share == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return tuple(tuple(cores[rank * share : (rank + 1) * share]) for rank in range(ranks))


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path


@dataclass
class RowProcesses:
    """The ranks of a row, ready to be asked.

    Attributes:
        row: which.
        place: where they run.
        timeline: whether generated kernels say their names to the profiler.

    Raises:
        RowFailed: they cannot be started.
    """

    row: Row
    place: Place
    timeline: bool = False
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
        """Have all ranks do something.

        Args:
            command: a method of :class:`bench_steps.rank.Rank`.
            values: its arguments.
            timeout_s: by default the place's.

        Returns:
            What each rank answers.

        Raises:
            RowFailed: a rank failed, ended, or did not answer in time. The others are killed.
        """
        if not self._ranks:
            raise RowFailed("it has no processes any more")
        try:
            for rank in self._ranks:
                rank.connection.send((command, *values))
            return self._receive("done", timeout_s or self.place.timeout_s)
        except (RowFailed, OSError) as error:
            self.kill()
            raise RowFailed(str(error)) from error

    def end(self) -> None:
        """Let the ranks end, and kill those that do not."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(("end",))
        deadline = time.monotonic() + END_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks, and what they have started: each is a session of its own."""
        for rank in self._ranks:
            kill_session(rank.process)
            rank.connection.close()
        self._ranks.clear()

    def _launch(self, rank: int) -> _Rank:
        place = self.place
        assignment = Assignment(
            self.row,
            place.model,
            place.size,
            rank,
            place.ranks,
            place.cores[rank],
            place.host,
            place.timeout_s,
            place.forwards,
            self.timeline,
        )
        ours, theirs = socket.socketpair()
        log = (
            place.directory
            / "logs"
            / f"{place.model}-{self.row.label}-{rank}.log".replace(" ", "-").replace(":", ".")
        )
        log.parent.mkdir(exist_ok=True)
        command = [*place.prefixes[rank], sys.executable, "-m", place.worker or WORKER]
        command += [assignment.to_json(), str(theirs.fileno())]
        with theirs:
            variables, kept = self._environment(), [theirs.fileno()]
            process = start_session(command, log, variables, appends=True, pass_fds=kept)
        return _Rank(process, Connection(ours.detach()), log)

    def _environment(self) -> dict[str, str]:
        # A cap changes no kernel, only what is launched: rows of a way share kernels.
        owner = "all" if self.place.shares_kernels else self.row.way or self.row.kind
        cache = self.place.directory / "caches" / f"{self.place.model}-{owner}".replace(" ", "-")
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(ROOT), str(ROOT / "tools"), *path]
        return {
            **{name: v for name, v in os.environ.items() if name != "FUSION_PASSES_DDP_FUSION"},
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": str(len(self.place.cores[0])),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # The key of a graph lacks the names of torch's fusion passes: with graphs in it, a
            # shared cache would give one way what another has compiled.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": str(int(not self.place.shares_kernels)),
            "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(not self.place.shares_kernels)),
            # Pools of compilers would compete with the ranks for their cores.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Torch tries this machine's vectors by six programs, which belong to a start alone.
            **({"TORCHINDUCTOR_VEC_ISA_OK": "1"} if self.place.shares_kernels else {}),
            "TRANSFORMERS_VERBOSITY": "error",
            **self.place.variables,
        }

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
                raise RowFailed(f"rank {silent} has not answered for {timeout_s:g} s")
            for connection in ready:
                index = waiting[connection]  # type: ignore[index]
                answers[index] = self._answer(ranks[index], index, kind)
        return [answers[index] for index in range(len(ranks))]

    def _answer(self, rank: _Rank, index: int, kind: str) -> Any:
        try:
            told, value = rank.connection.recv()
        except (EOFError, OSError):
            code = rank.process.wait()
            raise RowFailed(f"rank {index} ended with {code}: {_last_words(rank.log)}") from None
        if told != kind:
            raise RowFailed(f"rank {index}: {value}")
        return value


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
