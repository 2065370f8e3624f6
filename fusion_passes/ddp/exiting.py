"""Lets Gloo's threads finish before a process or a process group ends.

A bucket is a tensor that generated code gives to a collective and that nothing else keeps: the
new gradients are views of its memory. So the last reference to it can be that of a thread of Gloo,
which drops it right after the collective has ended, and needs Python for that. Once the interpreter
is ending, it ends threads that ask for it, and with Gloo's the whole process aborts ("terminate
called without an active exception", torch 2.11 to 2.15, before Python 3.14): seen in one of 56 runs
of two ranks on a busy machine that ended right after their last step.

Likewise, a group of Gloo that ends waits for its threads and keeps Python to itself meanwhile: for
ever, if one of them drops its last collective. Seen with eager DDP alone, too, in 1 of 7
runs on a busy machine where a function that had destroyed the groups returned.
"""

from __future__ import annotations

import atexit
import time
from typing import Final

import torch.distributed as dist

from fusion_passes.state import Lifetime, process_state

_SECONDS: Final = 0.05
"""Thousands of times as long as a thread needs that is running, and nothing beside a start."""


@process_state.once("whether a pause at the program's end is registered", Lifetime.PROCESS)
def pause_at_exit() -> None:
    """Give Gloo's threads a moment with Python, once the program has ended."""
    atexit.unregister(_pause)  # Of before a reset.
    atexit.register(_pause)


def pause_without_groups() -> None:
    """The same before a module goes, where all groups are destroyed: the last reference to its own
    may go with it."""
    if not dist.is_initialized():
        _pause()


def _pause() -> None:
    time.sleep(_SECONDS)
