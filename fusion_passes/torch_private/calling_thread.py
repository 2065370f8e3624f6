"""Which thread has called the backward that runs: on a GPU, and where many backwards are inside of
one another, autograd runs them in threads of its own. These see what the thread that calls the
engine has in torch's table of thread-local objects. Checked on torch 2.11.0, 2.13.0 and 2.14.1."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from typing import Final

import torch

_KEY: Final = "fusion_passes.calling_thread"


@contextlib.contextmanager
def marked_thread() -> Iterator[None]:
    """A context in which :func:`calling_thread` is this one, also in threads of autograd's."""
    _stash(threading.get_ident())
    try:
        yield
    finally:
        _stash(0)


def calling_thread() -> int:
    """The thread that has called the backward which runs in this one; this one, if none does."""
    known = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else 0
    return int(known) or threading.get_ident()


def _stash(value: int) -> None:
    references = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(_KEY, value)
    if sys.getrefcount(value) == references:  # Torch 2.11 takes the caller's reference.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
