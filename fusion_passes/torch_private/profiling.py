"""Private names of the profiler, and of process groups whose collectives it is to show by name.
Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

# What a process group gives back for a collective; it has no public name.
from torch._C._distributed_c10d import Work

# What a name stands for now; and the group of all ranks, of which the public name is only known
# once there is one.
from torch.distributed.distributed_c10d import _get_default_group, _resolve_process_group

from fusion_passes.torch_private import ProcessGroup
from fusion_passes.torch_private.stand_ins import StandInGroup

PREFIX: Final = "ddp_fusion: "
"""With which all names of the package in a profile begin."""


def world_group() -> Any:
    """The group of all ranks."""
    return _get_default_group()


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread; 50 ns."""
    return bool(torch.autograd._profiler_enabled())


class NamedGroup(StandInGroup):
    """A process group whose all-reduces have names in a profile: ranges around their launches, and
    around the waits for them. On a GPU, torch's profiler shows a range on the stream, too, for as
    long as what was launched in it runs.

    Args:
        group: does the work; can be one that stands for another group itself.
        next_name: what the next all-reduce is called.
    """

    def __init__(self, group: ProcessGroup, next_name: Callable[[], str]) -> None:
        super().__init__(group)
        self._group = group
        self._next_name = next_name

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        return self._launch(self._group.allreduce, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._launch(self._group.allreduce_coalesced, tensors, opts)

    def _launch(self, launch: Callable[[Any, Any], Work], tensors: Any, opts: Any) -> Work:
        name = f"{PREFIX}{self._next_name()}"
        with torch.autograd.profiler.record_function(f"{name} launch"):
            return _NamedWork(launch(tensors, opts), f"{name} wait")


class _NamedWork(Work):
    """A collective that was launched, the wait for which has a name in a profile."""

    def __init__(self, work: Work, name: str) -> None:
        super().__init__()
        self._work = work
        self._name = name

    def wait(self, *timeout: Any) -> bool:
        with torch.autograd.profiler.record_function(self._name):
            return bool(self._work.wait(*timeout))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def range_in_profile(name: str) -> contextlib.AbstractContextManager[Any]:
    """Around a call that has a name in a profile, if one is recorded."""
    if not is_profiling():
        return contextlib.nullcontext()
    return torch.autograd.profiler.record_function(f"{PREFIX}{name}")


def has_named_group(name: str) -> bool:
    """Whether a name stands for a :class:`NamedGroup`."""
    return isinstance(_resolve_process_group(name), NamedGroup)  # type: ignore[arg-type]


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
