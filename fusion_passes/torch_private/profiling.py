"""Private names of torch's profiler, and what torch has counted of its own compiling."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

PREFIX: Final = "ddp_fusion: "
"""With which all names of the package in a profile begin."""


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread."""
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


# --- Compiling -----------------------------------------------------------------------------------


def seconds_by_name() -> dict[str, float]:
    """Seconds that torch has spent under each of its names for the parts of a compile, in this
    process; parts hold others. Nothing is imported for that: where nothing was compiled, there is
    nothing. ``torch._dynamo.reset()`` forgets them."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    return {name: sum(times) for name, times in utils.compilation_time_metrics.items()}
