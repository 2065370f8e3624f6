"""What a rank does when in one step. Nothing here imports torch at the start: ranks choose their
cores before they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Lane = Literal["compute", "launch", "wait", "network"]
LANES: Final[tuple[Lane, ...]] = ("compute", "launch", "wait", "network")

PATTERNS: Final[tuple[tuple[Lane, re.Pattern[str]], ...]] = (
    ("network", re.compile(r"gloo:|nccl:|ncclDevKernel|ncclKernel")),
    ("wait", re.compile(r"_c10d_functional::wait_tensor")),
    ("launch", re.compile(r"_c10d_functional::|c10d::")),
    ("compute", re.compile(r"aten::|mkl|graph_\d|cpp_fused|kernel|triton_|fusion_passes::|void ")),
)
"""How the profiler calls what belongs to a lane; the first that is found in a name. What is in none
holds others: regions, graphs, autograd nodes."""


@dataclass(frozen=True)
class Span:
    """Something that a rank does.

    Attributes:
        lane: what kind of thing.
        name: of the operator or kernel; of merged ones, the first.
        start_s: seconds from the start of the step.
        end_s: likewise.
    """

    lane: Lane
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankTimeline:
    """One step of a rank.

    Attributes:
        seconds: of the step.
        spans: in each lane, in time order, without overlap except on the network.
    """

    seconds: float
    spans: tuple[Span, ...]

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which something of a lane goes on."""
        return sum(end - start for start, end in merged(self._intervals(lane)))

    def hidden_s(self) -> float:
        """Seconds in which the network is busy while the rank computes."""
        computing = merged(self._intervals("compute"))
        sending = merged(self._intervals("network"))
        return sum(
            max(0.0, min(end, other_end) - max(start, other_start))
            for start, end in sending
            for other_start, other_end in computing
        )

    def _intervals(self, lane: Lane) -> list[tuple[float, float]]:
        return [(span.start_s, span.end_s) for span in self.spans if span.lane == lane]


def lane_of(name: str) -> Lane | None:
    """The lane of what the profiler calls so; ``None`` for what only holds others."""
    return next((lane for lane, pattern in PATTERNS if pattern.search(name)), None)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What of some intervals is in none of others."""
    rest = merged(intervals)
    for low, high in merged(others):
        cut = [((start, min(end, low)), (max(start, high), end)) for start, end in rest]
        rest = [part for parts in cut for part in parts if part[0] < part[1]]
    return rest


def timeline_of(events: Iterable[tuple[str, float, float]], seconds: float) -> RankTimeline:
    """The timeline of a step.

    Args:
        events: name, start and end, in seconds from the start of the step. Operators hold others.
        seconds: of the step.
    """
    known = [(lane_of(name), name, start, end) for name, start, end in events]
    spans = [Span(lane, *rest) for lane, *rest in known if lane == "network"]  # type: ignore[arg-type]
    collective: list[tuple[float, float]] = []
    for lane in ("wait", "launch"):
        mine = [(start, end) for other, _, start, end in known if other == lane]
        spans += [Span(lane, lane, start, end) for start, end in without(mine, collective)]
        collective += mine
    computing = [(start, end) for lane, _, start, end in known if lane == "compute"]
    spans += [Span("compute", "compute", *part) for part in without(computing, collective)]
    return RankTimeline(seconds, tuple(sorted(spans, key=lambda span: span.start_s)))


def record(run: Callable[[], None], barrier: Callable[[], None]) -> RankTimeline:
    """Make a step under the profiler, once all ranks are ready."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        barrier()
        with record_function("bench step"):
            run()
            if cuda:
                torch.cuda.synchronize()
    # Ends and threads of single events are not in the profiler's public tables.
    events: list[Any] = profiler.profiler.kineto_results.events()
    (step,) = [event for event in events if event.name() == "bench step" and _is_host(event)]
    begin, end = step.start_ns(), step.start_ns() + step.duration_ns()
    inside = [event for event in events if begin <= event.start_ns() < end and _counts(event, cuda)]
    spans = [_times(event, begin) for event in inside if event is not step]
    return timeline_of(spans, step.duration_ns() / 1e9)


def _is_host(event: Any) -> bool:
    import torch

    return bool(event.device_type() == torch.autograd.DeviceType.CPU)


def _counts(event: Any, cuda: bool) -> bool:
    """On a GPU, computing and sending is what its kernels do, not what the host says."""
    lane = lane_of(event.name())
    return not cuda or _is_host(event) == (lane in ("launch", "wait"))


def _times(event: Any, begin: int) -> tuple[str, float, float]:
    start = event.start_ns() - begin
    return event.name(), start / 1e9, (start + event.duration_ns()) / 1e9
