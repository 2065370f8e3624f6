"""The recorded steps of all ranks, the times of each bucket in them, and the page that shows
them."""

from __future__ import annotations

import bisect
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fusion_passes.reporting.spans import LANES, RankTimeline, Span, merged, without


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket was on its way: medians over the recorded steps, in seconds from the start of a
    step.

    Attributes:
        launched_s: start of its launch.
        started_s: time at which the network begins with it.
        ended_s: time at which the network is done with it.
        exposed_s: duration in which the network is busy with it and the rank does not compute. If
            several buckets are on the network, this time is the first one's, so that the buckets'
            times sum up to the exposed time of the step.
    """

    launched_s: float
    started_s: float
    ended_s: float
    exposed_s: float


@dataclass(frozen=True)
class StepTimes:
    """How the time of a step is spent: medians over the recorded steps, in seconds.

    Attributes:
        step_s: duration of the step, including the profiler's own time.
        compute_s: time in which the rank computes.
        network_s: time in which the network is busy.
        hidden_s: time in which the network is busy and the rank computes.
        exposed_s: time in which the network is busy and the rank does not compute.
    """

    step_s: float
    compute_s: float
    network_s: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class RankSteps:
    """Consecutive steps of one rank. A step ends when a backward ends that has completed the
    gradients of a module, so it begins with the optimizer's step.

    Attributes:
        rank: number of the rank.
        place: host and process.
        start_s: start of the first step, in seconds since the first step began on rank 0.
        clock_error_s: largest possible error of ``start_s``, in seconds.
        ends_s: end of each step, in seconds since the first step began.
        spans: what the rank did, in seconds since the first step began.
    """

    rank: int
    place: str
    start_s: float
    clock_error_s: float
    ends_s: tuple[float, ...]
    spans: tuple[Span, ...]

    def steps(self) -> Iterator[tuple[float, RankTimeline]]:
        """The start of each step, and the step by itself, from 0 on. A span that crosses the start
        or end of a step is cut off there."""
        for begin, end in zip((0.0, *self.ends_s), self.ends_s, strict=False):
            inside = (span for span in self.spans if span.start_s < end and span.end_s > begin)
            cut = tuple(
                Span(s.lane, s.name, max(s.start_s, begin) - begin, min(s.end_s, end) - begin)
                for s in inside
            )
            yield begin, RankTimeline(end - begin, cut)

    def times(self) -> StepTimes:
        """How the time of a step is spent."""
        rows = [
            (step.seconds, step.busy_s("compute"), step.busy_s("network"), step.hidden_s())
            for _, step in self.steps()
        ]
        columns = (*zip(*rows, strict=True), [network - hidden for _, _, network, hidden in rows])
        return StepTimes(*map(statistics.median, columns))

    def bucket_times(self, names: Iterable[str]) -> dict[str, BucketTimes]:
        """The times of the buckets with these names that some step sent, in launch order."""
        wanted = frozenset(names)
        seen: dict[str, list[BucketTimes]] = {}
        for _, step in self.steps():
            for name, times in _buckets_of(step, wanted):
                seen.setdefault(name, []).append(times)
        found = {
            name: BucketTimes(*map(statistics.median, zip(*map(astuple, times), strict=True)))
            for name, times in seen.items()
        }
        return dict(sorted(found.items(), key=lambda item: item[1].launched_s))


@dataclass(frozen=True)
class Timeline:
    """The recorded steps of all ranks, by one clock.

    Attributes:
        ranks: steps of each rank that has answered, by number, on rank 0; on others, their own
            steps.
        buckets: parameters of each bucket, by the bucket's name.
        plain_step_s: seconds of a step before the recording, without a profiler; 0 if no step was
            timed, or torch compiled in all of them.
        missing: numbers of the ranks that have not answered.
    """

    ranks: tuple[RankSteps, ...]
    buckets: Mapping[str, tuple[str, ...]]
    plain_step_s: float
    missing: tuple[int, ...] = ()


def exposed_of(step: RankTimeline) -> list[tuple[Span, list[tuple[float, float]]]]:
    """The spans on the network in a step, in order of time, each with the intervals in which it is
    to blame for exposed time: it is on the network, no span that began earlier is, and the rank
    does not compute."""
    sent = sorted((s for s in step.spans if s.lane == "network"), key=lambda span: span.start_s)
    computing = merged(step.intervals("compute"))
    starts, ends = [start for start, _ in computing], [end for _, end in computing]
    begun, found = 0.0, []
    for span in sent:
        low, begun = max(span.start_s, begun), max(span.end_s, begun)
        near = computing[bisect.bisect_right(ends, low) : bisect.bisect_left(starts, begun)]
        found.append((span, without([(low, begun)], near)))
    return found


def _buckets_of(step: RankTimeline, wanted: frozenset[str]) -> Iterator[tuple[str, BucketTimes]]:
    launched: dict[str, float] = {}
    for span in step.spans:
        if span.lane == "launch":
            launched.setdefault(span.name, span.start_s)
    for span, exposed in exposed_of(step):
        if span.name in wanted:
            launched_s = launched.get(span.name, span.start_s)
            exposed_s = sum(end - start for start, end in exposed)
            yield span.name, BucketTimes(launched_s, span.start_s, span.end_s, exposed_s)


# --- The page ------------------------------------------------------------------------------------


def write_page(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a page for any browser: one file that loads nothing, made of
    ``timeline.html`` and the steps."""
    template = (resources.files("fusion_passes.reporting") / "timeline.html").read_text("utf-8")
    # The data contains the user's text, which must not end the script.
    data = json.dumps(_page_data(timeline), separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(template.replace("/*TIMELINE*/null", data, 1), encoding="utf-8")


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """The data that the page's script reads: times in microseconds, names by index."""
    names: dict[str, int] = {}

    def rows(spans: Iterable[Span], offset_s: float) -> list[list[float]]:
        return [
            [
                round((offset_s + span.start_s) * 1e6, 1),
                round((span.end_s - span.start_s) * 1e6, 1),
                names.setdefault(span.name, len(names)),
            ]
            for span in sorted(spans, key=lambda span: span.start_s)
        ]

    ranks = [
        {
            "rank": item.rank,
            "place": item.place,
            "clockErrorUs": round(item.clock_error_s * 1e6, 1),
            "startUs": round(item.start_s * 1e6, 1),
            "endsUs": [round((item.start_s + end) * 1e6, 1) for end in item.ends_s],
            "lanes": {lane: rows(spans, item.start_s) for lane, spans in _lanes(item).items()},
            "times": vars(item.times()),
        }
        for item in timeline.ranks
    ]
    return {
        "ranks": ranks,
        "names": list(names),
        "parameters": {name: list(items) for name, items in timeline.buckets.items()},
        "plainStepS": timeline.plain_step_s,
        "missing": list(timeline.missing),
    }


def _lanes(item: RankSteps) -> dict[str, list[Span]]:
    """The spans of a rank by lane, and the exposed parts of the network's spans, by bucket."""
    lanes: dict[str, list[Span]] = {
        lane: [span for span in item.spans if span.lane == lane] for lane in LANES
    }
    lanes["exposed"] = [
        Span("network", span.name, begin + low, begin + high)
        for begin, step in item.steps()
        for span, times in exposed_of(step)
        for low, high in times
    ]
    return lanes
