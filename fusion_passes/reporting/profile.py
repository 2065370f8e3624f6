"""Records what a rank does when, with torch's profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from fusion_passes.reporting.spans import Event, RankTimeline, lane_of, timeline_of
from fusion_passes.torch_private.profiling import PREFIX, recorded_events


def new_profiler() -> profile:
    """A profiler of the host, and of the GPU where there is one."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *gpu])


def read_profile(
    profiler: profile, begin_ns: int, end_ns: int, *, host_computes: bool = False
) -> RankTimeline:
    """The timeline of what began between two times.

    Args:
        profiler: stopped.
        begin_ns: as of ``time.time_ns()``.
        end_ns: likewise.
        host_computes: as for :func:`fusion_passes.reporting.spans.timeline_of`.
    """
    cuda = torch.cuda.is_available()
    events: list[Event] = []
    for name, start, end, on_host in recorded_events(profiler):
        if begin_ns <= start < end_ns and _counts(name, on_host, cuda):
            # A GPU shows a range as long as what was launched in it runs: that is the network.
            shown = name if on_host or not name.startswith(PREFIX) else name.removesuffix(" launch")
            events.append((shown, (start - begin_ns) / 1e9, (end - begin_ns) / 1e9))
    return timeline_of(events, (end_ns - begin_ns) / 1e9, host_computes=host_computes)


def _counts(name: str, on_host: bool, cuda: bool) -> bool:
    """On a GPU, computing and sending is what its kernels do, not what the host says."""
    if name.startswith(PREFIX):
        return on_host or name.endswith(" launch")
    return not cuda or on_host == (lane_of(name) in ("launch", "wait"))
