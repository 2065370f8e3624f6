"""Private names of torch's profiler, and of the times that torch records of its compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

PREFIX: Final = "ddp_fusion: "
"""Prefix of all names of the package in a profile."""


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread."""
    return bool(torch.autograd._profiler_enabled())


def range_in_profile(name: str, *, prefix: str = PREFIX) -> contextlib.AbstractContextManager[Any]:
    """A context that has this name in a profile, if one is being recorded. Torch's context calls an
    operator in either case."""
    if not is_profiling():
        return contextlib.nullcontext()
    return torch.autograd.profiler.record_function(f"{prefix}{name}")


def named_in_profile(call: Callable[[], Any], name: str) -> Callable[[], None]:
    """A function that does the same as ``call``, under a name in a profile if one is being recorded
    at that time."""

    def named() -> None:
        with range_in_profile(name):
            call()

    return named


def recorded_events(profiler: torch.profiler.profile) -> list[tuple[str, int, int, bool]]:
    """The events that a stopped profiler has recorded: name, start and end in nanoseconds since the
    epoch, and whether the event ran on the host. The profiler's public tables do not have the ends
    of single events."""
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


def compile_seconds() -> float:
    """A sum of torch's compile times in this process, which grows whenever anything is compiled. It
    counts parts of a compile several times. Nothing is imported for that."""
    utils = sys.modules.get("torch._dynamo.utils")
    return sum(map(sum, utils.compilation_time_metrics.values())) if utils is not None else 0.0
