"""The pause at the end of a program that has trained over Gloo.

A Gloo thread may hold the last reference to a bucket. It drops the reference right after its
collective, and needs the GIL for that. A finalizing interpreter ends the threads that ask for the
GIL; if it ends one of Gloo's, the whole process aborts ("terminate called without an active
exception", torch 2.11 to 2.15, before Python 3.14). Seen in 1 of 56 runs of two ranks that ended
right after their last step, on a busy machine.

Likewise, the destructor of a Gloo process group joins the group's threads and holds the GIL
meanwhile. It hangs if one of those threads is dropping its last collective. Seen with eager DDP
alone, too, in 1 of 7 runs on a busy machine, when a function that had destroyed the groups
returned.
"""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist


@functools.cache
def pause_at_exit() -> None:
    """Register a pause at the program's end, in which Gloo's threads can take the GIL."""
    atexit.register(_pause)


def pause_without_groups() -> None:
    """Pause before a module is freed after all process groups were destroyed: the module may hold
    the last reference to its group."""
    if not dist.is_initialized():
        _pause()


def _pause() -> None:
    """Wait thousands of times as long as a running thread needs; short beside a program's start."""
    time.sleep(0.05)
