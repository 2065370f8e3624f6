"""Writes a timeline as a page for any browser: ``timeline.html``, with the steps in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline, exposed_of


def write_page(timeline: Timeline, path: str | Path) -> None:
    """Write one file that loads nothing."""
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
