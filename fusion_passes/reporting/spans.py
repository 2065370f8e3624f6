"""The activity of a rank over a step, read from the events of torch's profiler."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Lane = Literal["compute", "launch", "wait", "network"]
LANES: Final[tuple[Lane, ...]] = ("compute", "launch", "wait", "network")

PATTERNS: Final[tuple[tuple[Lane, re.Pattern[str]], ...]] = (
    ("network", re.compile(r"gloo:|nccl:|ncclDevKernel|ncclKernel")),
    ("wait", re.compile(r"_c10d_functional::wait_tensor|^ddp_fusion: .* wait$")),
    ("launch", re.compile(r"_c10d_functional::|c10d::|^ddp_fusion: .* launch$")),
    ("network", re.compile(r"^ddp_fusion: ")),
    ("compute", re.compile(r"aten::|mkl|graph_\d|cpp_fused|kernel|triton_|fusion_passes::|void ")),
)
"""The lane of an event, by its name in the profiler: the lane of the first pattern that matches. An
event without a lane holds other events: regions, graphs, autograd nodes. Names that begin with
``ddp_fusion`` are the package's own; such a name without launch or wait is what a GPU does for a
launch."""

_NAMED: Final = re.compile(r"ddp_fusion: (.*?)(?: launch| wait)?")

Event: TypeAlias = tuple[str, float, float]
"""Name, start and end of an event; times in seconds."""


@dataclass(frozen=True)
class Span:
    """Something that a rank does for some time.

    Attributes:
        lane: kind of activity.
        name: name of the bucket that is launched, waited for or sent, if there is one; otherwise
            the name of the operator, or of the lane.
        start_s: start, in seconds from the start of the step.
        end_s: end, in seconds from the start of the step.
    """

    lane: Lane
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankTimeline:
    """One step of a rank.

    Attributes:
        seconds: duration of the step.
        spans: spans in the order of their starts; in one lane they do not overlap, except on the
            network.
    """

    seconds: float
    spans: tuple[Span, ...]

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which a lane has a span."""
        return length(self.intervals(lane))

    def hidden_s(self) -> float:
        """Seconds in which the network is busy while the rank computes."""
        computing, sending = self.intervals("compute"), self.intervals("network")
        return length(sending) - length(without(sending, computing))

    def intervals(self, lane: Lane) -> list[tuple[float, float]]:
        """Start and end of each span in a lane."""
        return [(span.start_s, span.end_s) for span in self.spans if span.lane == lane]


def lane_of(name: str) -> Lane | None:
    """The lane of an event with this name; ``None`` for an event that only holds others."""
    return next((lane for lane, pattern in PATTERNS if pattern.search(name)), None)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order of time."""
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
    """The parts of ``intervals`` that lie in none of ``others``, in order of time."""
    removed, rest, at = merged(others), list[tuple[float, float]](), 0
    for start, end in merged(intervals):
        low = start
        while at < len(removed) and removed[at][1] <= low:
            at += 1
        last = at
        while last < len(removed) and removed[last][0] < end:
            if removed[last][0] > low:
                rest.append((low, removed[last][0]))
            low = max(low, removed[last][1])
            last += 1
        if low < end:
            rest.append((low, end))
    return rest


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in the union of intervals."""
    return sum(end - start for start, end in merged(intervals))


def timeline_of(
    events: Iterable[Event], seconds: float, *, host_computes: bool = False
) -> RankTimeline:
    """The timeline of a step that takes ``seconds``, from events, which may hold each other.

    With ``host_computes``, everything that the host does counts as computing, except launch and
    wait: on a CPU, the profiler has no events for most kernels. Otherwise events say what is
    computing.
    """
    known = sorted(
        ((lane_of(name), name, start, end) for name, start, end in events),
        key=lambda item: (item[2], -item[3]),
    )
    of_lane = {lane: [(n, a, b) for other, n, a, b in known if other == lane] for lane in LANES}
    spans = [Span("network", *item) for item in _sent(of_lane["network"], of_lane["launch"])]
    collective: list[tuple[float, float]] = []
    for lane in ("wait", "launch"):
        parts = without([(a, b) for _, a, b in of_lane[lane]], collective)
        spans += _with_names(lane, parts, of_lane[lane])
        collective += parts
    computing = [(a, b) for _, a, b in of_lane["compute"]]
    if host_computes:
        computing = [(0.0, seconds)]
    spans += [Span("compute", "compute", *part) for part in without(computing, collective)]
    return RankTimeline(seconds, tuple(sorted(spans, key=lambda span: span.start_s)))


def _with_names(
    lane: Lane, parts: Iterable[tuple[float, float]], events: Sequence[Event]
) -> Iterator[Span]:
    """Make a span of each part, with the name of the named event that overlaps it."""
    named = [(match[1], a, b) for n, a, b in events if (match := _NAMED.fullmatch(n))]
    starts = [start for _, start, _ in named]
    for low, high in parts:
        last = bisect.bisect_left(starts, high) - 1
        name = named[last][0] if last >= 0 and named[last][2] > low else lane
        yield Span(lane, name, low, high)


def _sent(sent: Sequence[Event], launches: Sequence[Event]) -> Iterator[Event]:
    """Give each event on the network the name of the bucket that it sends.

    A backend runs collectives in launch order, so the nth event on the network is the nth launch.
    If several process groups run at once, their orders can mix, and so can the names.
    """
    own = [(match[1], a, b) for n, a, b in sent if (match := _NAMED.fullmatch(n))]
    yield from own
    others = [event for event in sent if not _NAMED.fullmatch(event[0])]
    if own:  # On a GPU, the work for a bucket has the bucket's name.
        for name, start, end in others:
            if not any(a <= start and end <= b for _, a, b in own):
                yield name, start, end
        return
    named = [(match[1], a, b) for n, a, b in launches if (match := _NAMED.fullmatch(n))]
    calls = [(a, b) for n, a, b in launches if n.startswith("c10d::")]
    labels = [next((n for n, a, b in named if a <= start <= b), "") for start, _ in calls]
    if len(labels) != len(others):  # Under no_sync, some launches send nothing.
        labels = list(filter(None, labels))
    for index, (name, start, end) in enumerate(others):
        label = labels[index] if len(labels) == len(others) else ""
        yield label or name, start, end
