"""Starts the ranks of a method and sends them commands; a rank executes them in :func:`serve`.

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
"""Time limit for importing torch on busy cores and for creating the process group, in seconds."""


class RanksFailed(Exception):  # noqa: N818
    """The ranks of a method failed. The message is the reason."""


@dataclass(frozen=True)
class Place:
    """The place where ranks run, and their model.

    Attributes:
        directory: directory for compiler caches.
        timeout_s: default time limit of a command, in seconds.
        cores: CPU cores of each rank.
        model: name of the model.
        size: name of the model's size.
        host: address of rank 0.
        prefixes: for each rank, the command that starts another command in the rank's network
            namespace; empty without namespaces.
        variables: environment variables for the network and for torch.
        backend: backend of the process group.
        forwards: number of forwards before the backward of a step.
        optimizer: name of the optimizer that steps after each backward; empty: none does.
        shares_kernels: whether all methods share a compiler cache. The cache then keeps no compiled
            graphs, and no start of a method is a cold one.
        worker: module that the ranks run.
        logs: directory for logs; by default a subdirectory of ``directory``.
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
    """The task of one rank.

    Attributes:
        place: place of all ranks.
        way: name of the method.
        cap_mb: bucket cap in MiB; ``None``: the method's default.
        rank: number of the rank.
    """

    place: Place
    way: str
    cap_mb: float | None
    rank: int

    @property
    def cores(self) -> tuple[int, ...]:
        """CPU cores of the rank."""
        return self.place.cores[self.rank]


@dataclass(frozen=True)
class Started:
    """The start of a rank: the wrapping in DDP and the first step.

    Attributes:
        seconds: duration.
        gradient_bytes: total size of the gradients.
        cpu_s: CPU seconds of all threads of the process.
    """

    seconds: float
    gradient_bytes: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Checked:
    """A comparison of a rank's gradients with those of eager DDP.

    Attributes:
        error: largest difference of an element, divided by the largest element of its gradient.
        worst: name of the parameter with this difference.
        missing: names of parameters that have a gradient in only one of the two.
        compared: whether gradients of eager DDP exist.
    """

    error: float = 0.0
    worst: str = ""
    missing: tuple[str, ...] = ()
    compared: bool = True

    def in_words(self, tolerance: float) -> str:
        """The difference in words; empty if there is none.

        Args:
            tolerance: largest allowed :attr:`error`.
        """
        if not self.compared:
            return "compared with nothing: eager DDP failed"
        if self.missing:
            return f"gradients of other parameters than eager DDP's: {', '.join(self.missing)}"
        if not self.error <= tolerance:
            return f"the gradient of {self.worst} is off by {self.error:.1%}"
        return ""


@dataclass(frozen=True)
class Stepped:
    """Measured steps of a rank.

    Attributes:
        seconds: duration of each step.
        cpu_s: CPU seconds of all threads of the process, for all steps together.
    """

    seconds: tuple[float, ...]
    cpu_s: float


def cores_of(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Distribute cores over ranks. Ranks share cores if there are fewer cores than ranks."""
    share = len(cores) // ranks
    if share == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return tuple(tuple(cores[rank * share : (rank + 1) * share]) for rank in range(ranks))


@dataclass
class RankProcesses:
    """The ranks of a method, which execute commands.

    Attributes:
        way: name of the method.
        place: place of the ranks.
        cap_mb: bucket cap in MiB; ``None``: the method's default.

    Raises:
        RanksFailed: the ranks could not be started.
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
            # Rank 0 chooses a free port, because it can be in another network namespace.
            (port,) = self._ask(self._ranks[:1], "listen", timeout_s=JOIN_S)
            self._ask(self._ranks, "join", port, timeout_s=JOIN_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, command: str, *values: object, timeout_s: float | None = None) -> list[Any]:
        """Call a method of :class:`benches.rank.Rank` on all ranks, and return the results.

        Args:
            command: name of the method.
            values: arguments of the method.
            timeout_s: time limit in seconds; by default that of the place.

        Raises:
            RanksFailed: a rank raised, died, or exceeded the time limit. All ranks are killed.
        """
        if not self._ranks:
            raise RanksFailed("it has no processes any more")
        return self._ask(self._ranks, command, *values, timeout_s=timeout_s or self.place.timeout_s)

    def kill(self) -> None:
        """Kill the ranks, and all processes that they started."""
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
            # This process still has both ends of the socket, so that this works if the rank died.
            rank.send(pickle.dumps(Assignment(place, self.way, self.cap_mb, number)))
        return rank

    def _environment(self) -> dict[str, str]:
        place = self.place
        # A cap changes collectives, but no kernels. The keys of cached graphs do not contain the
        # names of torch's fusion passes, so methods that share a cache must not share graphs.
        owner = "all" if place.shares_kernels else self.way
        cache = place.directory / "caches" / f"{place.model}-{owner}".replace(" ", "-")
        threads, keeps = len(place.cores[0]), not place.shares_kernels
        variables = environment(cache, threads=threads, keeps_graphs=keeps) | {**place.variables}
        return _KEEPS_MEMORY | variables


_KEEPS_MEMORY: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""Has glibc keep freed memory. By default it returns what lies at the end of the heap after a step,
and takes it back page by page in the next one: up to 1,400 page faults in each step, or none, by
what a process has allocated when it started. That is up to a fifth of a short step."""


def serve(arguments: list[str], kind: Callable[[Assignment], Any]) -> NoReturn:
    """The main function of a rank: execute commands until the process is killed.

    Args:
        arguments: the file descriptor of the connection.
        kind: makes the object whose methods are the commands.
    """
    connection = Connection(int(arguments[0]))
    assignment: Assignment = pickle.loads(connection.recv_bytes())
    # On an interrupt, the parent kills its ranks. If the parent ends, they end by themselves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # Set before torch starts threads.
    os.sched_setaffinity(0, assignment.cores)
    rank = functools.cache(lambda: kind(assignment))
    answer(connection, lambda request: getattr(rank(), request[0])(*request[1:]))
