"""Processes, one a rank, that are asked together over pipes until one of them cannot answer; and a
pool of such, which runs functions over Gloo.

A :class:`RankPool` keeps its processes from job to job, and all are forked from one that has
imported torch and Inductor, because that takes a process several seconds. What one job could leave
to the next is undone between them: each job has a process group of its own, starts from a reset
Dynamo, a package that has forgotten all, and a fixed seed, and fails if it leaves torch's
configuration changed. A job that fails or hangs costs the pool its processes: the next job gets new
ones.

A rank is a session of its own: what ends it ends the compilers that it started. It ends itself when
its parent closes the connection, or is gone.
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

# Torch is imported in functions only: who asks for ranks need not have it.

JOB_SECONDS = 240.0
"""For one job: a cold compile takes up to 90 s on two busy cores, and a job has a few."""

GRACE_SECONDS = 2.0
"""How long the other ranks may take to fail too, once one has: their tracebacks help."""

LAST_WORDS = 8000
"""Characters of what a rank has written to stderr that are shown when it has no result."""

COLLECTED_AFTER = (50_000, 20, 100)
"""For ``gc.set_threshold``: a compile makes objects by the hundred thousand, which mostly stay, and
looks for garbage among them for a tenth of its time with Python's own thresholds."""

PRELOADED = (
    "torch._dynamo.compiled_autograd",
    "torch._inductor.compile_fx",
    # What the first compile of a process imports and takes longest, with torch 2.13.
    "sympy.physics.units",
    "torch.distributed.tensor.experimental._attention",
    "torch.utils.cpp_extension",
)
"""What is imported before ranks are forked, with all of torch: modules that start no thread. The
package itself is not among them, nor what tests import."""


def fork_server_pid() -> int | None:
    """The process that ranks are forked from, once there is one."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


class RankError(RuntimeError):
    """Ranks cannot answer.

    Attributes:
        failures: what is known of each rank that has no result, by its number; in the order in
            which it became known. The first line says it in short.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        texts = [f"rank {number}: {failures[number]}" for number in sorted(failures)]
        super().__init__("\n\n".join(["no result of these ranks", *texts]))
        self.failures = failures

    @property
    def brief(self) -> str:
        """What went wrong first, in a line."""
        number, failure = next(iter(self.failures.items()))
        return f"rank {number}: {failure.partition(chr(10))[0]}"


@dataclass(eq=False)
class Rank:
    """A process that answers, as its parent sees it.

    Attributes:
        number: of the rank.
        process: leads a session of its own; writes where it is into ``log`` at a ``SIGUSR1``.
        connection: on which it is asked, and answers with a failure, if any, and a result.
        log: a file with what it has written to stderr.
        result: its last answer.
    """

    number: int
    process: subprocess.Popen[bytes] | BaseProcess
    connection: Connection
    log: Path
    result: Any = None

    def send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # It has died: :meth:`receive` says how.
            self.connection.send_bytes(request)

    def receive(self) -> str | None:
        """``None`` if all went well, which gives :attr:`result`; else what went wrong."""
        failure: str | None
        try:
            # Not by ``send``: torch has that share the memory of tensors.
            failure, self.result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = wait_for(self.process, 1)
            return f"died with exit code {code}: {last_words(self.log)}\n{self._tail()}"
        return failure

    def dump_stack(self) -> str:
        """Where its Python threads are now."""
        if wait_for(self.process, 0) is None and self.log.exists():
            assert self.process.pid is not None, "it was started"
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._tail()

    def _tail(self) -> str:
        """The last that it has written: warnings, its stacks when it was asked for them, what a C++
        thread that aborts says."""
        words = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"its errors:\n{words[-LAST_WORDS:]}"


def ask(ranks: Sequence[Rank], request: object, timeout_s: float) -> list[Any]:
    """Send a request to ranks, and wait until each has answered, or it is known that one never
    will; what they answer.

    Raises:
        RankError: a rank failed, died, or was not done in time. The caller has to kill all.
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
    """In a rank: answer each request with what ``handle`` returns for it, or with the error that it
    raises, until the process is killed. Once nobody can ask any more, it kills itself and all that
    it has started, also in the middle of an answer."""
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
        except BaseException as error:  # noqa: BLE001  Whatever it is, the parent has to know.
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            answered = pickle.dumps((told, None))
        connection.send_bytes(answered)


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Processes that run jobs together: as many as a job asks for, kept for the next one that asks
    for as many.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, list[Rank]] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> set[int]:
        """The processes that are alive now."""
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
        """Call ``function(**kwargs)`` on every rank, inside a Gloo process group.

        Args:
            world_size: how many ranks.
            function: of a module's top level, as are the callables in ``kwargs``.
            timeout_s: for the whole job.
            kwargs: anything that can be pickled.

        Returns:
            What the function returned on each rank, in rank order: anything that can be pickled.

        Raises:
            RankError: a rank raised, died, or was not done in time. All ranks are killed.
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
        """End the processes and remove their files."""
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
    """What makes processes by forking one that has imported :data:`PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    if fork_server_pid() is None:
        context.set_forkserver_preload(list(PRELOADED))
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # Read when torch is imported.
            forkserver.ensure_running()
    return context


def _serve(rank: int, world_size: int, connection: Connection, errors_file: Path) -> None:
    """Main function of a rank: runs jobs until it is killed."""
    os.setsid()
    # In append mode, so that emptying the file between jobs leaves no gap.
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
    # The collection below, and those within the job, look at what the job has made alone: looking
    # at all that torch consists of takes a third of a second.
    gc.freeze()
    torch.manual_seed(0)
    random.seed(0)
    store = dist.FileStore(f"{directory}/store", world_size)
    timeout = timedelta(seconds=JOB_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(**kwargs)
    _forget()
    gc.collect()  # DDP modules end before their process group does.
    ended = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    _ended_groups[:] = ended
    changed = settings.restore()
    assert not changed, f"the job left these settings changed: {changed}"
    return result


def _forget() -> None:
    """Let torch's compiler and the package forget what was before."""
    import torch

    torch._dynamo.reset()
    if "fusion_passes" in sys.modules:
        forget()


_ended_groups: list[Any] = []
"""The groups of the job before. A callback of torch's powerSGD_hook holds its group, and a thread
of Gloo frees it some time after the collective: if that is the last reference, the thread joins
itself, and the process aborts ("Resource deadlock avoided"; 5 of 130 jobs of eager DDP with that
hook, torch 2.15 on a busy machine; none of 165 with this)."""


CONFIG_MODULES = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config")
"""What a job or a test may set, but must set back."""


class TorchSettings:
    """The settings of torch's config modules at one moment."""

    def __init__(self) -> None:
        self._values = {name: self._read(name) for name in CONFIG_MODULES}

    def restore(self) -> dict[str, Any]:
        """Set back what has changed since.

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
        # The modules' own get_config_copy() copies deeply: no object would equal its copy.
        config: Any = importlib.import_module(module_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Some settings are deprecated.
            values = {name: getattr(config, name) for name in config._config}
        return {
            name: copy.copy(value) if isinstance(value, (list, dict, set)) else value
            for name, value in values.items()
        }
