"""The ranks of a method: where and how they are started, what they are asked, and how one answers.

Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from testing.processes import Rank, RankError, answer, ask
from testing.sessions import Sessions, environment

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
        optimizer: name of the optimizer that steps behind each backward; empty: none does.
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
    optimizer: str = ""
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
    _ranks: list[Rank] = field(default_factory=list)
    _sessions: Sessions = field(default_factory=Sessions)

    def __post_init__(self) -> None:
        try:
            for rank in range(self.place.ranks):
                self._ranks.append(self._launch(rank))
            # Free where rank 0 runs, which can be another network namespace.
            (port,) = self._ask(self._ranks[:1], "listen", timeout_s=JOIN_S)
            self._ask(self._ranks, "join", port, timeout_s=JOIN_S)
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
        return self._ask(self._ranks, command, *values, timeout_s=timeout_s or self.place.timeout_s)

    def kill(self) -> None:
        """Kill the ranks, and what they have started."""
        for rank in self._ranks:
            rank.connection.close()
        self._ranks.clear()
        self._sessions.kill()

    def _ask(
        self, ranks: Sequence[Rank], command: str, *values: object, timeout_s: float
    ) -> list[Any]:
        try:
            return ask(ranks, (command, *values), timeout_s)
        except RankError as error:
            self.kill()
            raise RanksFailed(error.brief) from error

    def _launch(self, number: int) -> Rank:
        place = self.place
        cap = "" if self.cap_mb is None else f"-{self.cap_mb:g}"
        name = f"{place.model}-{self.way}{cap}-{number}.log".replace(" ", "-").replace(":", ".")
        log = (place.logs or place.directory / "logs") / name
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        descriptor = str(theirs.fileno())
        prefix = place.prefixes[number] if place.prefixes else ()
        command = [*prefix, sys.executable, "-m", place.worker, descriptor]
        with theirs:
            variables = self._environment()
            process = self._sessions.start(command, log, variables, [theirs.fileno()])
            rank = Rank(number, process, Connection(ours.detach()), log)
            # While this process has the other end too: that one may have died already.
            rank.send(pickle.dumps(Assignment(place, self.way, self.cap_mb, number)))
        return rank

    def _environment(self) -> dict[str, str]:
        place = self.place
        # A cap changes no kernel, only what is launched. The key of a graph lacks the names of
        # torch's fusion passes: a shared cache with graphs in it would give one way another's.
        owner = "all" if place.shares_kernels else self.way
        cache = place.directory / "caches" / f"{place.model}-{owner}".replace(" ", "-")
        threads, keeps = len(place.cores[0]), not place.shares_kernels
        return environment(cache, threads=threads, keeps_graphs=keeps) | {**place.variables}


def serve(arguments: list[str], kind: Callable[[Assignment], Any]) -> NoReturn:
    """In a rank: make what has its commands as methods, and answer until the process is killed."""
    connection = Connection(int(arguments[0]))
    assignment: Assignment = pickle.loads(connection.recv_bytes())
    # The command that is interrupted kills its ranks; without it they end by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # Before torch starts threads.
    os.sched_setaffinity(0, assignment.cores)
    rank = functools.cache(lambda: kind(assignment))
    answer(connection, lambda request: getattr(rank(), request[0])(*request[1:]))
