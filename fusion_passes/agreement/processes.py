"""The processes that a group's ranks run in, on this machine, and whether they have ended.

A collective of the backend fails when the process of another rank ends. A rank that waits over the
store is not told: the store knows nothing of who asks it. But it can see for itself what becomes of
ranks on its own machine.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

_KEY: Final = "ddp_fusion/processes"

_STATE, _STARTED = 0, 19
"""Fields of Linux's ``/proc/PID/stat`` behind the program's name: what the process does, and when
it was started, in clock ticks since the machine was (``man 5 proc``)."""

_ENDED_STATES: Final = frozenset("ZX")
"""It has ended, and its parent has yet to ask how."""


@dataclass(frozen=True)
class Process:
    """A process of this machine.

    Attributes:
        pid: which another process can have later.
        started: when it was started, in clock ticks.
    """

    pid: int
    started: int

    def has_ended(self) -> bool:
        """Whether it runs no more. False where that can't be seen."""
        try:
            os.kill(self.pid, 0)  # /proc hides those of other users on some machines.
        except ProcessLookupError:
            return True
        except OSError:
            return False
        fields = _stat(self.pid)
        return bool(fields) and (
            fields[_STATE] in _ENDED_STATES or int(fields[_STARTED]) != self.started
        )


def introduce(store: Any, rank: int, pid: int) -> None:
    """Say in which process a rank runs. Nothing is said where nobody could look, or where the store
    does not keep lists."""
    machine, fields = _machine(), _stat(pid)
    if machine and fields:
        with contextlib.suppress(RuntimeError):
            store.append(f"{_KEY}/{machine}", f"{rank} {pid} {fields[_STARTED]},")


def processes_here(store: dist.Store) -> dict[int, Process]:
    """Those of this machine that were introduced, by rank."""
    key = f"{_KEY}/{_machine()}"
    if not store.check([key]):
        return {}
    entries = [map(int, entry.split()) for entry in store.get(key).decode().split(",")[:-1]]
    return {rank: Process(pid, started) for rank, pid, started in entries}


def _machine() -> str:
    """Which machine this is, and which of its sets of process numbers; empty where there is no
    ``/proc``, or one with other numbers, as a container can have its host's."""
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """What Linux says of a process, behind its program's name; empty where it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
