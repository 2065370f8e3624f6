"""The identity of a pass in Inductor's caches."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fusion_passes.torch_private.inductor import donates_buffers
from fusion_passes.version import __version__


def pass_identity(*read: object) -> str:
    """The identity of a pass, for the key of the FX graph cache. ``read``: everything that the pass
    reads besides the graph and this package. It includes whether a backward may overwrite buffers
    that its forward saved, because that key does not (torch 2.11 to 2.14)."""
    state = [__version__, source_hash(), donates_buffers(), *read]
    return hashlib.sha256(repr(state).encode()).hexdigest()


@functools.cache
def source_hash() -> str:
    """The hash of all Python files of the package."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
