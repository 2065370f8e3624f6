"""A timeline as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline, exposed_of

EXPOSED: Final = "exposed"
PREDICTED: Final = "predicted"
STEP: Final = "step"
TRACKS: Final = (STEP, *LANES, PREDICTED, EXPOSED)
"""The tracks of each rank, from above. A rank is a process of the trace, and a track a thread."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's trace event format: complete events, in microseconds from the start
    of the first step on rank 0."""
    events: list[dict[str, Any]] = []
    for item in timeline.ranks:
        name = {"name": f"rank {item.rank} ({item.place})"}
        events.append({"ph": "M", "name": "process_name", "pid": item.rank, "args": name})
        for number, track in enumerate(TRACKS):
            if track == PREDICTED and not timeline.predicted:
                continue
            where = {"ph": "M", "pid": item.rank, "tid": number}
            events.append({**where, "name": "thread_name", "args": {"name": track}})
            events.append({**where, "name": "thread_sort_index", "args": {"sort_index": number}})
        predicted = [(PREDICTED, span) for span in timeline.predicted_spans(item)]
        for track, span in (*_steps(item), *_of_lanes(item), *predicted, *exposed_spans(item)):
            args: dict[str, Any] = {}
            if span.name in timeline.buckets:
                args = {"parameters": list(timeline.buckets[span.name])}
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": track,
                    "pid": item.rank,
                    "tid": TRACKS.index(track),
                    "ts": (item.start_s + span.start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": args,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _steps(item: RankSteps) -> Iterator[tuple[str, Span]]:
    begin = 0.0
    for number, end in enumerate(item.ends_s):
        yield STEP, Span("compute", f"step {number}", begin, end)
        begin = end


def _of_lanes(item: RankSteps) -> Iterator[tuple[str, Span]]:
    for span in item.spans:
        yield span.lane, span


def exposed_spans(item: RankSteps) -> Iterator[tuple[str, Span]]:
    """When a rank's network was busy and the rank did not compute, by the bucket to blame."""
    begin = 0.0
    for step, end in zip(item.steps(), item.ends_s, strict=True):
        for span, times in exposed_of(step):
            for low, high in times:
                yield EXPOSED, Span("network", span.name, begin + low, begin + high)
        begin = end
