"""Runs functions on ranks: one process per rank, which receives requests over a pipe and sends its
results back.

:func:`ask` sends one request to several ranks and collects their results. :class:`RankPool` keeps
ranks alive from job to job, and runs each job in a Gloo process group. It forks all ranks from one
process that has imported torch and Inductor, because these imports take several seconds. Jobs are
isolated from each other: each job has its own process group, starts with a reset Dynamo, a reset
package and a fixed seed, and fails if it leaves torch's configuration changed. If a job fails or
hangs, the pool kills its ranks, and the next job gets new ones.

Each rank leads a session, so that killing the session also kills the compilers that the rank
started. A rank kills its session when its parent closes the pipe or ends.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.context
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from testing.fresh import forget
from testing.sessions import kill_session, last_words, wait_for

# Torch is imported inside functions: a process that only sends requests does not need it.

JOB_SECONDS = 240.0
"""Time limit of a job: a cold compile takes up to 90 s on two busy cores, and a job has several."""

GRACE_SECONDS = 2.0
"""Time that the other ranks have to fail as well after the first rank failed, so that their
tracebacks are reported too."""

LAST_WORDS = 8000
"""Number of characters of a rank's stderr, counted from its end, that an error contains."""

COLLECTED_AFTER = (50_000, 20, 100)
"""Arguments of ``gc.set_threshold``. A compile creates hundreds of thousands of objects, most of
which stay alive. With Python's default thresholds, garbage collection takes a tenth of its time."""

PRELOADED = (
    "torch._dynamo.compiled_autograd",
    "torch._inductor.compile_fx",
    # The slowest imports of the first compile in a process, with torch 2.13.
    "sympy.physics.units",
    "torch.distributed.tensor.experimental._attention",
    "torch.utils.cpp_extension",
)
"""Modules that are imported, with all of torch, before ranks are forked. None of them starts a
thread. The package itself and the imports of tests are not included."""


def fork_server_pid() -> int | None:
    """Process id of the fork server; ``None`` until it has started."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


RUN = Callable[..., list[Any]]
"""The type of :meth:`RankPool.run`."""


class RankError(RuntimeError):
    """Some ranks have no result.

    Attributes:
        failures: the failure of each rank without a result, by rank, in the order in which the
            failures were noticed. The first line of a failure is its summary.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        texts = [f"rank {number}: {failures[number]}" for number in sorted(failures)]
        super().__init__("\n\n".join(["no result of these ranks", *texts]))
        self.failures = failures

    @property
    def brief(self) -> str:
        """The summary of the first failure."""
        number, failure = next(iter(self.failures.items()))
        return f"rank {number}: {failure.partition(chr(10))[0]}"


@dataclass(eq=False)
class Rank:
    """The parent's handle of a rank.

    Attributes:
        number: number of the rank.
        process: the process, which leads its own session, and writes its stacks to ``log`` on
            ``SIGUSR1``.
        connection: the pipe. Each response is a pair: the failure or ``None``, and the result.
        log: file that contains the rank's stderr.
        result: result of the last request.
    """

    number: int
    process: subprocess.Popen[bytes] | BaseProcess
    connection: Connection
    log: Path
    result: Any = None

    def send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # The rank died: :meth:`receive` reports it.
            self.connection.send_bytes(request)

    def receive(self) -> str | None:
        """Receive a response and set :attr:`result`. Return the failure, or ``None``."""
        failure: str | None
        try:
            # Ranks do not use ``Connection.send``, for which torch shares the memory of tensors.
            failure, self.result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = wait_for(self.process, 1)
            return f"died with exit code {code}: {last_words(self.log)}\n{self._tail()}"
        return failure

    def dump_stack(self) -> str:
        """Make the rank write the stacks of its Python threads, and return the end of its log."""
        if wait_for(self.process, 0) is None and self.log.exists():
            assert self.process.pid is not None, "the process was started"
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._tail()

    def _tail(self) -> str:
        """The end of the log: warnings, requested stacks, the message of a C++ abort."""
        words = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"its errors:\n{words[-LAST_WORDS:]}"


def ask(ranks: Sequence[Rank], request: object, timeout_s: float) -> list[Any]:
    """Send a request to all ranks, and return their results.

    Args:
        ranks: ranks that are idle.
        request: argument of the function that the ranks call (see :func:`answer`).
        timeout_s: time limit, in seconds.

    Raises:
        RankError: a rank raised, died, or exceeded the time limit. The caller must kill all ranks.
    """
    sent = pickle.dumps(request)
    for rank in ranks:
        rank.send(sent)
    deadline = time.monotonic() + timeout_s
    fate = f"not done after {timeout_s:g} s"
    running = list(ranks)
    failures: dict[int, str] = {}
    while running and (left := deadline - time.monotonic()) > 0:
        ready = wait([rank.connection for rank in running], left)
        done = [rank for rank in running if rank.connection in ready]
        running = [rank for rank in running if rank not in done]
        news = {rank.number: failure for rank in done if (failure := rank.receive())}
        if news and not failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            fate = "still running, killed because another rank failed"
        failures |= news
    failures |= {rank.number: f"{fate}\n{rank.dump_stack()}" for rank in running}
    if failures:
        raise RankError(failures)
    return [rank.result for rank in ranks]


def answer(connection: Connection, handle: Callable[[Any], object]) -> NoReturn:
    """The loop of a rank: call ``handle`` with each request, and send its return value or its
    exception back. When the parent closes the connection or ends, kill the session of this process,
    even while ``handle`` runs."""
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        request = requests.get()
        try:
            answered = pickle.dumps((None, handle(pickle.loads(request))))
        except BaseException as error:  # noqa: BLE001  The parent reports any exception.
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            answered = pickle.dumps((told, None))
        connection.send_bytes(answered)


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Ranks that run jobs. The ranks of each world size are kept for the next job with the same
    world size.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, list[Rank]] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> set[int]:
        """Process ids of all ranks."""
        ranks = itertools.chain.from_iterable(self._ranks.values())
        return {rank.process.pid for rank in ranks if rank.process.pid is not None}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *,
        timeout_s: float = JOB_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(**kwargs)`` on each rank of a Gloo process group.

        Args:
            world_size: number of ranks.
            function: a function at the top level of a module, because it is pickled.
            timeout_s: time limit of the job, in seconds.
            kwargs: keyword arguments that can be pickled.

        Returns:
            The return value of the function on each rank, in rank order. It must be picklable.

        Raises:
            RankError: a rank raised, died, or exceeded the time limit. All ranks are killed.
        """
        ranks = self._ranks.setdefault(world_size, [])
        with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as directory:
            try:
                while len(ranks) < world_size:
                    ranks.append(_fork(len(ranks), world_size))
                return ask(ranks, (directory, function, kwargs), timeout_s)
            except BaseException:
                self._kill(world_size)
                raise

    def close(self) -> None:
        """Kill all ranks, and remove their logs."""
        for world_size in [*self._ranks]:
            self._kill(world_size)

    def _kill(self, world_size: int) -> None:
        for rank in self._ranks.pop(world_size):
            rank.connection.close()
            kill_session(rank.process)
            rank.log.unlink(missing_ok=True)


def _fork(number: int, world_size: int) -> Rank:
    """Start a rank of a pool."""
    context = _fork_server()
    ours, theirs = context.Pipe()
    file, log = tempfile.mkstemp(prefix=f"rank-{number}-", suffix=".txt")
    os.close(file)
    arguments = (number, world_size, theirs, Path(log))
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return Rank(number, process, ours, Path(log))


def _fork_server() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forked from one that has imported :data:`PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    if fork_server_pid() is None:
        context.set_forkserver_preload(list(PRELOADED))
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # Read when torch is imported.
            forkserver.ensure_running()
    return context


def _serve(rank: int, world_size: int, connection: Connection, errors_file: Path) -> None:
    """Main function of a rank of a pool: run jobs until the process is killed."""
    os.setsid()
    # In append mode, so that truncating the file between jobs leaves no gap.
    os.dup2(os.open(errors_file, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, file=sys.stderr.fileno(), all_threads=True)
    faulthandler.enable(sys.stderr.fileno(), all_threads=True)

    import torch

    torch.set_num_threads(1)
    gc.set_threshold(*COLLECTED_AFTER)
    answer(connection, functools.partial(_run_job, rank, world_size, errors_file))


def _run_job(
    rank: int, world_size: int, errors_file: Path, job: tuple[str, Callable[..., Any], Any]
) -> Any:
    import torch
    import torch.distributed as dist

    os.truncate(errors_file, 0)
    directory, function, kwargs = job
    settings = TorchSettings()
    _forget()
    # Garbage collections in the job and below then scan only objects of the job. Scanning all of
    # torch takes a third of a second.
    gc.freeze()
    torch.manual_seed(0)
    random.seed(0)
    store = dist.FileStore(f"{directory}/store", world_size)
    timeout = timedelta(seconds=JOB_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(**kwargs)
    _forget()
    gc.collect()  # DDP modules must be freed before their process group.
    ended = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    _ended_groups[:] = ended
    changed = settings.restore()
    assert not changed, f"the job left these settings changed: {changed}"
    return result


def _forget() -> None:
    """Reset Dynamo, and the package if it is imported."""
    import torch

    if "fusion_passes" in sys.modules:
        forget()
    else:
        torch._dynamo.reset()


_ended_groups: list[Any] = []
"""The process groups of the previous job, kept alive until the next job ends. A callback of torch's
``powerSGD_hook`` holds its group, and a thread of Gloo frees the callback some time after the
collective. If the callback held the last reference, the thread would join itself, and the process
would abort ("Resource deadlock avoided": 5 of 130 jobs of eager DDP with that hook, with torch 2.15
on a busy machine; none of 165 jobs with this list)."""


CONFIG_MODULES = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config")
"""Config modules whose settings a job or a test may change, but must restore."""


class TorchSettings:
    """The settings of torch's config modules at one moment."""

    def __init__(self) -> None:
        self._values = {name: self._read(name) for name in CONFIG_MODULES}

    def restore(self) -> dict[str, Any]:
        """Restore the settings that have changed since.

        Returns:
            The changed values by name, such as ``torch._dynamo.config.compiled_autograd``.
        """
        changed = {}
        for name, before in self._values.items():
            config, now = importlib.import_module(name), self._read(name)
            for setting, value in before.items():
                if now[setting] is not value and now[setting] != value:
                    changed[f"{name}.{setting}"] = now[setting]
                    setattr(config, setting, value)
        return changed

    @staticmethod
    def _read(module_name: str) -> dict[str, Any]:
        # get_config_copy() of these modules makes deep copies, which do not equal the originals.
        config: Any = importlib.import_module(module_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Some settings are deprecated.
            values = {name: getattr(config, name) for name in config._config}
        return {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in values.items()
        }
