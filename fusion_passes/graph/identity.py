"""The identity of a pass in Inductor's caches."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Final

from fusion_passes.torch_private.inductor import donates_buffers


def pass_identity(*read: object) -> str:
    """The identity of a pass, for the key of the FX graph cache. ``read``: everything that the pass
    reads besides the graph and this package. It includes whether a backward may overwrite buffers
    that its forward saved, because that key does not (torch 2.11 to 2.14)."""
    state = [source_hash(), donates_buffers(), *read]
    return hashlib.sha256(repr(state).encode()).hexdigest()


SHAPING: Final = (
    "config.py",
    "graph/*.py",
    "layout/*.py",
    "reducer/communication.py",
    "sharded/overlap.py",
    "stored/*.py",
    "torch_private/*.py",
    "traced/*.py",
)
"""The files that decide what graphs and generated code look like: all that the passes and the
lowerings import, down to the operators by which a graph calls reducers. The version of the package
is in ``config.py``."""

UNREAD: Final = re.compile(rb'^ *"""[\s\S]*?"""|(?:^ *|  )#.*', re.MULTILINE)
"""Docstrings and comments, in code that ruff has formatted."""


@functools.cache
def source_hash() -> str:
    """The hash of the code in :data:`SHAPING`, without docstrings and comments."""
    return hash_of_code(Path(__file__).parent.parent)


def hash_of_code(package: Path) -> str:
    """:func:`source_hash` of the package in this folder."""
    files = sorted(file for pattern in SHAPING for file in package.glob(pattern))
    code = b"\n".join(UNREAD.sub(b"", file.read_bytes()) for file in files)
    lines = (line for line in code.splitlines() if line.strip())
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
