"""Private names of the profiler, and of process groups whose collectives it is to show by name.
Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

# What a process group gives back for a collective; it has no public name.
# What a name stands for now; and the group of all ranks, of which the public name is only known
# once there is one.
from torch.distributed.distributed_c10d import _get_default_group

PREFIX: Final = "ddp_fusion: "
"""With which all names of the package in a profile begin."""


def world_group() -> Any:
    """The group of all ranks."""
    return _get_default_group()


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread; 50 ns."""
    return bool(torch.autograd._profiler_enabled())


def range_in_profile(name: str) -> contextlib.AbstractContextManager[Any]:
    """Around a call that has a name in a profile, if one is recorded."""
    if not is_profiling():
        return contextlib.nullcontext()
    return torch.autograd.profiler.record_function(f"{PREFIX}{name}")


def named_in_profile(call: Callable[[], Any], name: str) -> Callable[[], None]:
    """A call as another one, that has a name in a profile, if one is recorded when it is called."""

    def named() -> None:
        with range_in_profile(name):
            call()

    return named


def recorded_events(profiler: torch.profiler.profile) -> list[tuple[str, int, int, bool]]:
    """What a profiler that was stopped has recorded: name, start and end in nanoseconds since the
    epoch, and whether it ran on the host. Its public tables have no ends of single events."""
    assert profiler.profiler is not None, "it was started"
    results: Any = profiler.profiler.kineto_results
    return [
        (
            event.name(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.device_type() == torch.autograd.DeviceType.CPU,
        )
        for event in results.events()
    ]
