"""Writes a timeline as a page, a picture, or a trace that Perfetto (https://ui.perfetto.dev) and
chrome://tracing open."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline, exposed_of

EXPOSED: Final = "exposed"
PREDICTED: Final = "predicted"
STEP: Final = "step"

COLORS: Final = (
    ("compute", "#2e7d32"),
    ("launch", "#1f6fb4"),
    ("wait", "#c0392b"),
    ("network", "#b8860b"),
    ("predicted", "#7a6fb0"),
    ("exposed", "#d81b60"),
)

_LABELLED: Final = 0.012
"""Share of a picture's width from which a bar has the number of its bucket."""

_WITH_EDGES: Final = 100
"""A lane of a picture with fewer bars shows the edges between them."""

_DATA: Final = "/*TIMELINE*/null"
"""Where the page has its data."""


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline in the form that a file's name asks for: ``.html``, a page that shows it in
    any browser, one file that loads nothing; ``.json``, a trace for https://ui.perfetto.dev;
    ``.png``, a picture of the last step.

    Raises:
        ModuleNotFoundError: a picture needs matplotlib: ``pip install fusion_passes[explain]``.
        ValueError: the name ends with something else.
    """
    path = Path(path)
    if path.suffix not in FORMS:
        raise ValueError(
            f"path must end with one of {', '.join(FORMS)}, but is {str(path)!r}. Its end says "
            "what is written: a page, a trace for Perfetto, or a picture."
        )
    FORMS[path.suffix](timeline, path)


def _write_page(timeline: Timeline, path: Path) -> None:
    template = (resources.files("fusion_passes.reporting") / "timeline.html").read_text("utf-8")
    # Text of the user's stands in it: nothing in it may end the script.
    data = json.dumps(_page_data(timeline), separators=(",", ":")).replace("</", "<\\/")
    path.write_text(template.replace(_DATA, data, 1), encoding="utf-8")


def _write_trace(timeline: Timeline, path: Path) -> None:
    path.write_text(json.dumps(_chrome_trace(timeline)), encoding="utf-8")


def _write_picture(timeline: Timeline, path: Path) -> None:
    # Without a display, and without a window's state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = len(LANES) + 1 + bool(timeline.predicted)
    figure = Figure(figsize=(11, 0.28 * lanes * len(timeline.ranks) + 1.1))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names: list[str] = []
    colors = dict(COLORS)
    windows = [(item, (0.0, *item.ends_s)[-2], item.ends_s[-1]) for item in timeline.ranks]
    first = min(item.start_s + begin for item, begin, _ in windows)
    last = max(item.start_s + end for item, _, end in windows)
    for item, begin, end in windows:
        if names:
            axes.axhline(len(names) - 0.5, color="#888888", linewidth=0.6)
        for track, spans in _tracks(timeline, item).items():
            shown = [s for s in spans if s.end_s > begin and s.start_s < end]
            bars = [
                ((item.start_s + s.start_s - first) * 1e3, (s.end_s - s.start_s) * 1e3)
                for s in shown
            ]
            _draw_lane(axes, len(names), bars, colors[track])
            for (left, wide), span in zip(bars, shown, strict=True):
                if span.name in timeline.buckets and wide > _LABELLED * (last - first) * 1e3:
                    number = span.name.rpartition(" bucket ")[2]
                    _write_on_bar(axes, left + wide / 2, len(names), number)
            names.append(f"rank {item.rank}, {track}")
    axes.set_xlim(0, (last - first) * 1e3)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms from the start of the last recorded step, by the clock of rank 0", fontsize=8
    )
    axes.tick_params(axis="x", labelsize=8)
    _title(axes, timeline.ranks[0])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_lane(axes: Any, row: int, bars: list[tuple[float, float]], color: str) -> None:
    # Of many bars, white edges would be all that is seen.
    edge = "white" if len(bars) < _WITH_EDGES else color
    axes.broken_barh(bars, (row - 0.4, 0.8), color=color, edgecolor=edge, linewidth=0.3)


def _write_on_bar(axes: Any, at: float, row: int, text: str) -> None:
    axes.text(at, row, text, color="white", fontsize=7, ha="center", va="center")


def _title(axes: Any, item: RankSteps) -> None:
    times = item.times()
    axes.set_title(
        f"a step of rank {item.rank}: {times.step_s * 1e3:.1f} ms; network busy for "
        f"{times.network_s * 1e3:.1f} ms, {times.exposed_s * 1e3:.1f} ms of it exposed; "
        "numbers are those of buckets",
        fontsize=8,
        loc="left",
    )


FORMS: Final = MappingProxyType(
    {".html": _write_page, ".json": _write_trace, ".png": _write_picture}
)
"""What writes a file, by the end of its name."""


def _tracks(timeline: Timeline, item: RankSteps) -> dict[str, list[Span]]:
    """What a rank did, by lane from above, with what was predicted of the network, if anything was,
    and what of it was exposed."""
    tracks: dict[str, list[Span]] = {
        lane: [span for span in item.spans if span.lane == lane] for lane in LANES
    }
    if predicted := list(timeline.predicted_spans(item)):
        tracks[PREDICTED] = predicted
    tracks[EXPOSED] = list(_exposed_spans(item))
    return tracks


def _exposed_spans(item: RankSteps) -> Iterator[Span]:
    """When a rank's network was busy and the rank did not compute, by the bucket to blame."""
    begin = 0.0
    for step, end in zip(item.steps(), item.ends_s, strict=True):
        for span, times in exposed_of(step):
            for low, high in times:
                yield Span("network", span.name, begin + low, begin + high)
        begin = end


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script reads: times in microseconds, names by number."""
    names: dict[str, int] = {}

    def rows(spans: Any, offset_s: float) -> list[list[float]]:
        return [
            [
                round((offset_s + s.start_s) * 1e6, 1),
                round((s.end_s - s.start_s) * 1e6, 1),
                names.setdefault(s.name, len(names)),
            ]
            for s in sorted(spans, key=lambda span: span.start_s)
        ]

    ranks = []
    for item in timeline.ranks:
        lanes = {
            track: rows(spans, item.start_s) for track, spans in _tracks(timeline, item).items()
        }
        ranks.append(
            {
                "rank": item.rank,
                "place": item.place,
                "clockErrorUs": round(item.clock_error_s * 1e6, 1),
                "startUs": round(item.start_s * 1e6, 1),
                "endsUs": [round((item.start_s + end) * 1e6, 1) for end in item.ends_s],
                "lanes": lanes,
                "times": vars(item.times()),
            }
        )
    return {
        "ranks": ranks,
        "names": list(names),
        "parameters": {name: list(items) for name, items in timeline.buckets.items()},
        "plainStepS": timeline.plain_step_s,
        "missing": list(timeline.missing),
        "colors": dict(COLORS),
    }


# --- The trace -----------------------------------------------------------------------------------


def _chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's trace event format: complete events, in microseconds from the start
    of the first step on rank 0, or from what is before: Perfetto drops what begins before zero. A
    rank is a process there, and a track a thread, or several where its spans overlap."""
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
        tracks = {STEP: _steps(item), **_tracks(timeline, item)}
        rows = [
            (track, number, row)
            for track, spans in tracks.items()
            for number, row in enumerate(_rows(spans))
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


def _steps(item: RankSteps) -> list[Span]:
    begins = (0.0, *item.ends_s)
    return [
        Span("compute", f"step {number}", begin, end)
        for number, (begin, end) in enumerate(zip(begins, item.ends_s, strict=False))
    ]
