"""Runs a function in real Gloo processes, one a rank.

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
import gc
import importlib
import multiprocessing
import multiprocessing.context
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

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
    """A job failed.

    Attributes:
        failures: what is known of each rank that has no result, by its number.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        texts = [f"rank {number}: {failures[number]}" for number in sorted(failures)]
        super().__init__("\n\n".join(["no result of these ranks", *texts]))
        self.failures = failures


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """``world_size`` processes that run jobs together.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._directory: Path | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> set[int]:
        """The processes that are alive now."""
        return {rank.process.pid for rank in self._ranks if rank.process.pid is not None}

    def run(
        self, function: Callable[..., Any], *, timeout_s: float = JOB_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(**kwargs)`` on every rank, inside a Gloo process group.

        Args:
            function: of a module's top level, as are the callables in ``kwargs``.
            timeout_s: for the whole job.
            kwargs: anything that can be pickled.

        Returns:
            What the function returned on each rank, in rank order: anything that can be pickled.

        Raises:
            RankError: a rank raised, died, or was not done in time. All ranks are killed.
        """
        self._start()
        assert self._directory is not None
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self._directory))
        job = pickle.dumps((str(directory), function, kwargs))
        try:
            for rank in self._ranks:
                rank.send(job)
            self._await(timeout_s)
            return [rank.result for rank in self._ranks]
        except BaseException:
            self._kill()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """End the processes and remove their files."""
        self._kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        if self._ranks:
            return
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks = [
            _Rank(rank, self.world_size, self._directory) for rank in range(self.world_size)
        ]

    def _await(self, timeout_s: float) -> None:
        """Wait until every rank is done; raise as soon as it is known that one never will be."""
        deadline = time.monotonic() + timeout_s
        fate = f"not done after {timeout_s:g} s"
        running = list(self._ranks)
        failures: dict[int, str] = {}
        while running and (left := deadline - time.monotonic()) > 0:
            ready = set(wait([source for rank in running for source in rank.sources], left))
            done = [rank for rank in running if ready.intersection(rank.sources)]
            running = [rank for rank in running if rank not in done]
            news = {rank.number: failure for rank in done if (failure := rank.receive())}
            if news and not failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                fate = "still running, killed because another rank failed"
            failures |= news
        failures |= {rank.number: f"{fate}; {rank.dump_stack()}" for rank in running}
        if failures:
            raise RankError(failures)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []


class _Rank:
    """One process, as its parent sees it."""

    def __init__(self, number: int, world_size: int, directory: Path) -> None:
        self.number = number
        self.errors_file = directory / f"errors-{number}.txt"
        self.result: Any = None
        context = _fork_server()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(number, world_size, theirs, self.errors_file),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    @property
    def sources(self) -> tuple[Any, Any]:
        """What becomes ready when the rank is done or dead."""
        return self.connection, self.process.sentinel

    def send(self, job: bytes) -> None:
        with contextlib.suppress(OSError):  # It has died: :meth:`receive` says how.
            self.connection.send_bytes(job)

    def receive(self) -> str | None:
        """``None`` if the job went well, which gives :attr:`result`; else what went wrong."""
        failure: str | None
        try:
            # Not by ``send``: torch has that share the memory of tensors.
            failure, self.result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(1)
            return f"died with exit code {self.process.exitcode}; {self._last_words()}"
        return failure

    def dump_stack(self) -> str:
        """Where its Python threads are now."""
        pid = self.process.pid
        if self.process.is_alive() and pid is not None and self.errors_file.exists():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self._last_words()

    def _last_words(self) -> str:
        """What it has written to stderr in this job: warnings, its stacks when it was asked for
        them, what a C++ thread that aborts says."""
        words = self.errors_file.read_text(errors="replace") if self.errors_file.exists() else ""
        return f"its errors:\n{words[-LAST_WORDS:]}"

    def kill(self) -> None:
        """End the process and what it has started."""
        pid = self.process.pid
        self.connection.close()
        if self.process.is_alive() and pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # It was killed before it could become a session.
                self.process.kill()
        self.process.join()


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
    os.dup2(os.open(errors_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, file=sys.stderr.fileno(), all_threads=True)
    faulthandler.enable(sys.stderr.fileno(), all_threads=True)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()

    import torch

    torch.set_num_threads(1)
    gc.set_threshold(*COLLECTED_AFTER)
    while True:
        job = jobs.get()
        os.truncate(errors_file, 0)
        connection.send_bytes(_run_job(rank, world_size, job))


def _receive(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Read jobs, and end a rank whose parent is gone, also in the middle of a job."""
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def _run_job(rank: int, world_size: int, job: bytes) -> bytes:
    """Run a job: the traceback if it fails, and its result, pickled."""
    try:
        directory, function, kwargs = pickle.loads(job)
        result = _run_isolated(rank, world_size, Path(directory), function, kwargs)
        return pickle.dumps((None, result))
    except BaseException:  # noqa: BLE001  Whatever it is, the parent has to know.
        return pickle.dumps((traceback.format_exc(), None))


def _run_isolated(
    rank: int, world_size: int, directory: Path, function: Callable[..., Any], kwargs: Any
) -> Any:
    import torch
    import torch.distributed as dist

    settings = TorchSettings()
    _forget()
    # The collection below, and those within the job, look at what the job has made alone: looking
    # at all that torch consists of takes a third of a second.
    gc.freeze()
    torch.manual_seed(0)
    random.seed(0)
    store = dist.FileStore(str(directory / "store"), world_size)
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
        from fusion_passes.state import process_state

        process_state.reset()


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
