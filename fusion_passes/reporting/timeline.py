"""Steps of all ranks as they ran, what they say of each bucket, and the page that shows them."""

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
        launched_s: its launch begins.
        started_s: the network begins with it.
        ended_s: the network is done with it.
        exposed_s: seconds in which the network is busy with it and the rank does not compute. Where
            several buckets are on the network, they are the first one's: all sum up to the exposed
            time of the step.
    """

    launched_s: float
    started_s: float
    ended_s: float
    exposed_s: float


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a step goes: medians over the recorded steps, in seconds.

    Attributes:
        step_s: of the step, with the profiler's own time.
        compute_s: the rank computes.
        network_s: the network is busy.
        hidden_s: both.
        exposed_s: the network is busy and the rank does not compute.
    """

    step_s: float
    compute_s: float
    network_s: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class RankSteps:
    """What one rank did in some steps, one after the other. A step ends where a backward has ended
    that has completed the gradients of a module, and so begins with the optimizer's step.

    Attributes:
        rank: its number.
        place: host and process.
        start_s: when the first step began, in seconds since it did on rank 0.
        clock_error_s: how far that may be off at most.
        ends_s: when each step ended, in seconds since the first began.
        spans: what it did, in seconds since the first step began.
    """

    rank: int
    place: str
    start_s: float
    clock_error_s: float
    ends_s: tuple[float, ...]
    spans: tuple[Span, ...]

    def steps(self) -> Iterator[tuple[float, RankTimeline]]:
        """When each step begins, and the step by itself, from 0 on. What goes on at its ends is cut
        off there."""
        for begin, end in zip((0.0, *self.ends_s), self.ends_s, strict=False):
            inside = (span for span in self.spans if span.start_s < end and span.end_s > begin)
            cut = tuple(
                Span(s.lane, s.name, max(s.start_s, begin) - begin, min(s.end_s, end) - begin)
                for s in inside
            )
            yield begin, RankTimeline(end - begin, cut)

    def times(self) -> StepTimes:
        """Where the time goes."""
        rows = [
            (step.seconds, step.busy_s("compute"), step.busy_s("network"), step.hidden_s())
            for _, step in self.steps()
        ]
        columns = (*zip(*rows, strict=True), [network - hidden for _, _, network, hidden in rows])
        return StepTimes(*map(statistics.median, columns))

    def bucket_times(self, names: Iterable[str]) -> dict[str, BucketTimes]:
        """The times of those of these buckets that were sent in some step, in the order of their
        launches."""
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
    """Some steps of all ranks, by one clock.

    Attributes:
        ranks: by number, on rank 0; on others this one alone. Ranks that have not answered are
            missing.
        buckets: the parameters of each bucket, by its name.
        plain_step_s: seconds of a step before the recording, without a profiler; 0 where none was
            timed, or torch compiled in all of them.
        missing: numbers of the ranks that have not answered.
    """

    ranks: tuple[RankSteps, ...]
    buckets: Mapping[str, tuple[str, ...]]
    plain_step_s: float
    missing: tuple[int, ...] = ()


def exposed_of(step: RankTimeline) -> list[tuple[Span, list[tuple[float, float]]]]:
    """The spans on the network in a step, in order, each with the intervals that it is to blame
    for: it is on the network, none that began earlier is, and the rank does not compute."""
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
    """Write a timeline as a page for any browser, ``timeline.html`` with the steps in it: one file
    that loads nothing."""
    template = (resources.files("fusion_passes.reporting") / "timeline.html").read_text("utf-8")
    # Text of the user's stands in it: nothing in it may end the script.
    data = json.dumps(_page_data(timeline), separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(template.replace("/*TIMELINE*/null", data, 1), encoding="utf-8")


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script reads: times in microseconds, names by number."""
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
    """What a rank did, and what of it was exposed, by the bucket to blame."""
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
