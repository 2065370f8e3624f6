"""Processes that lead a session of their own, so that what they start ends with them, and processes
that are known by a variable of their environment, whoever their parent is.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

POLL_S: Final = 0.1


def start_session(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    appends: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that reads nothing and prints into a file.

    Args:
        command: what it runs.
        log: the file.
        environment: all of it.
        appends: whether what the file holds already stays.
        pass_fds: descriptors that it inherits.
    """
    with log.open("ab" if appends else "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a process of :func:`start_session` and what it has started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def marked(variable: str, mark: str) -> Iterator[int]:
    """Processes that were started with ``variable=mark`` and still run, as far as the system tells.
    Those that have ended and wait for their parent have no environment any more."""
    wanted = f"{variable}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def kill_marked(variable: str, mark: str) -> None:
    """Kill the processes that were started with ``variable=mark``, and wait until none is left.
    Killing a session does not reach those that lead another one."""
    while pids := list(marked(variable, mark)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
