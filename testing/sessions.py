"""Starts processes, and kills them together with all processes that they started.

Each process leads its own session and has a mark in its environment. Child processes inherit both,
so that they can be found whatever their parent is. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
"""The checkout."""

MARKS: Final = "FUSION_PASSES_STARTED_IN"
"""Environment variable with the marks of all :class:`Sessions` that a process was started in,
separated by :data:`os.pathsep`."""

POLL_S: Final = 0.1


def environment(cache: Path, *, threads: int = 1, keeps_graphs: bool = False) -> dict[str, str]:
    """The environment of a process that trains.

    Args:
        cache: directory of Inductor's cache.
        threads: number of OpenMP threads.
        keeps_graphs: whether the cache keeps compiled graphs, besides compiled kernels.
    """
    paths = [str(ROOT), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kept = {name: v for name, v in os.environ.items() if name != "FUSION_PASSES_DDP_FUSION"}
    return kept | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": str(int(keeps_graphs)),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(keeps_graphs)),
        # Compile workers would compete with the ranks for the cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Otherwise torch tests vector instructions with six programs, which only measurements of a
        # start should include.
        **({} if keeps_graphs else {"TORCHINDUCTOR_VEC_ISA_OK": "1"}),
        "TRANSFORMERS_VERBOSITY": "error",
    }


class Sessions(contextlib.AbstractContextManager["Sessions"]):
    """A context manager that kills the processes that it started, with all of their descendants.

    Args:
        mark: mark of the processes; by default a random one.
    """

    def __init__(self, mark: str = "") -> None:
        self.mark = mark or secrets.token_hex(8)
        self._leaders: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a process without input.

        Args:
            command: command and arguments.
            log: file to which its output is appended.
            environment: complete environment, to which the mark is added.
            pass_fds: file descriptors that the process inherits.
        """
        outer = environment.get(MARKS)
        marks = f"{outer}{os.pathsep}{self.mark}" if outer else self.mark
        with log.open("ab") as output:
            leader = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, MARKS: marks},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self._leaders.append(leader)
        return leader

    def pids(self) -> list[int]:
        """Ids of running processes with the mark, without zombies, which have no environment."""
        prefix, mark, found = f"{MARKS}=".encode(), self.mark.encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                for variable in path.read_bytes().split(b"\0"):
                    marks = variable.removeprefix(prefix).split(os.pathsep.encode())
                    if variable.startswith(prefix) and mark in marks:
                        found.append(int(path.parent.name))
        return found

    def send(self, *signals: signal.Signals, but: int | None = None) -> None:
        """Send signals to all processes with the mark except one."""
        for pid in {*self.pids()} - {but}:
            with contextlib.suppress(ProcessLookupError):
                for number in signals:
                    os.kill(pid, number)

    def left_after(self, seconds: float) -> list[int]:
        """Ids of the processes that are still running after this time limit."""
        end = time.monotonic() + seconds
        while (found := self.pids()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return found

    def kill(self) -> None:
        """Kill all processes, and wait until none is left: also descendants that lead another
        session, which have the mark."""
        while self._leaders:
            kill_session(self._leaders.pop())
        while self.pids():
            self.send(signal.SIGKILL)
            time.sleep(POLL_S)


def kill_session(leader: subprocess.Popen[bytes] | BaseProcess) -> None:
    """Kill the session of a process, and wait for the process."""
    assert leader.pid is not None, "the process was started"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()  # In case it has not created its session yet.
    wait_for(leader)


def wait_for(
    process: subprocess.Popen[bytes] | BaseProcess, seconds: float | None = None
) -> int | None:
    """The exit code of a process; ``None`` if it is still running after the time limit."""
    if isinstance(process, BaseProcess):
        process.join(seconds)
        return process.exitcode
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode


def last_words(log: Path) -> str:
    """The last line that a process printed."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
