"""Processes that lead a session of their own and carry a mark in their environment: both are
inherited, so that what they start ends with them, whoever its parent is.

Nothing here imports torch.
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
"""Environment variable: the marks of all :class:`Sessions` that a process was started in, with
:data:`os.pathsep` between them."""

POLL_S: Final = 0.1


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


class Sessions(contextlib.AbstractContextManager["Sessions"]):
    """Processes that are ended together, with all that they have started; at the latest at the end
    of the block.

    Args:
        mark: by which they are known; by default one of their own.
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
        """Start a process that reads nothing and adds what it prints to a file.

        Args:
            command: what it runs.
            log: the file.
            environment: all of it, but for the mark.
            pass_fds: descriptors that it inherits.
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
        """The ids of running processes with the mark. A process that has ended and waits for its
        parent is not among them: it has no environment any more."""
        prefix, mark, found = f"{MARKS}=".encode(), self.mark.encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                for variable in path.read_bytes().split(b"\0"):
                    marks = variable.removeprefix(prefix).split(os.pathsep.encode())
                    if variable.startswith(prefix) and mark in marks:
                        found.append(int(path.parent.name))
        return found

    def send(self, *signals: signal.Signals, but: int | None = None) -> None:
        """Send signals to all processes with the mark, but for one."""
        for pid in {*self.pids()} - {but}:
            with contextlib.suppress(ProcessLookupError):
                for number in signals:
                    os.kill(pid, number)

    def left_after(self, seconds: float) -> list[int]:
        """The processes that do not end by themselves, within so many seconds."""
        end = time.monotonic() + seconds
        while (found := self.pids()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return found

    def kill(self) -> None:
        """Kill all, and wait until none is left. Killing a session does not reach those that lead
        another one, which the mark does."""
        while self._leaders:
            kill_session(self._leaders.pop())
        while self.pids():
            self.send(signal.SIGKILL)
            time.sleep(POLL_S)


def kill_session(leader: subprocess.Popen[bytes] | BaseProcess) -> None:
    """Kill a process that leads a session, and what is in that, and wait for it."""
    assert leader.pid is not None, "it was started"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()  # It may not have got to its own session yet.
    wait_for(leader)


def wait_for(
    process: subprocess.Popen[bytes] | BaseProcess, seconds: float | None = None
) -> int | None:
    """The exit code of a process; ``None`` if it has not ended within so many seconds."""
    if isinstance(process, BaseProcess):
        process.join(seconds)
        return process.exitcode
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode


def last_words(log: Path) -> str:
    """The last line that a process has printed."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
