"""A timeline as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline, exposed_of

EXPOSED: Final = "exposed"
PREDICTED: Final = "predicted"
STEP: Final = "step"
TRACKS: Final = (STEP, *LANES, PREDICTED, EXPOSED)
"""The tracks of each rank, from above. A rank is a process of the trace, and a track a thread, or
several where its spans overlap."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's trace event format: complete events, in microseconds from the start
    of the first step on rank 0, or from what is before: Perfetto drops what begins before zero."""
    events: list[dict[str, Any]] = []
    # Perfetto takes zero for the idle process, a thread of its process's number for the main one,
    # and a number for one thread, whatever its process.
    threads = itertools.count(max((item.rank for item in timeline.ranks), default=0) + 2)
    for item in timeline.ranks:
        pid, name = item.rank + 1, {"name": f"rank {item.rank} ({item.place})"}
        order = {"sort_index": item.rank}
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": name},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": order},
        ]
        predicted = [(PREDICTED, span) for span in timeline.predicted_spans(item)]
        spans = [*_steps(item), *_of_lanes(item), *predicted, *exposed_spans(item)]
        rows = [
            (track, number, row)
            for track in TRACKS
            for number, row in enumerate(_rows([span for other, span in spans if other == track]))
        ]
        for index, (track, number, row) in enumerate(rows):
            where = {"pid": pid, "tid": next(threads)}
            label = f"{track} {number + 1}" if number else track
            events += [
                {"ph": "M", **where, "name": "thread_name", "args": {"name": label}},
                {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": index}},
            ]
            events += [
                {"ph": "X", **where, "cat": track, **_event(timeline, item, span)} for span in row
            ]
    timed = [event for event in events if "ts" in event]
    first = min(0.0, *(event["ts"] for event in timed))
    for event in timed:
        event["ts"] = round(event["ts"] - first, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Rows without overlap; none without spans.

    What Perfetto shows of a thread must be nested, and a backend can have several buckets on the
    network at once.
    """
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.start_s):
        free = (row for row in rows if not row or row[-1].end_s <= span.start_s)
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows if rows[0] else []


def _event(timeline: Timeline, item: RankSteps, span: Span) -> dict[str, Any]:
    parameters = timeline.buckets.get(span.name)
    begin, end = (round((item.start_s + at) * 1e6, 3) for at in (span.start_s, span.end_s))
    return {
        "name": span.name,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": {} if parameters is None else {"parameters": list(parameters)},
    }


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
