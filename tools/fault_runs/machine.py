"""What a run asks the machine. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import getpass
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testing import sessions

MARK = "FAULT_RUN"
"""Environment variable by which the processes of a run are known, whoever their parent is."""


def marked(mark: str) -> Iterator[int]:
    """Processes of a run that still run."""
    return sessions.marked(MARK, mark)


def command_of(pid: int) -> str:
    """What a process runs."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace")[:200]
    return str(pid)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def fresh_directory(parent: Path, name: str) -> Path:
    """A directory that does not exist yet."""
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    shutil.rmtree(path)
    return path


def stock_cache_name() -> str:
    """How Inductor names its cache in TMPDIR, where it always keeps the headers that it compiles:
    ``torch._inductor.runtime.cache_dir_utils.default_cache_dir``, torch 2.11 to 2.15."""
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
