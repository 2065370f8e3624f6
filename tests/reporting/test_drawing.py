"""The timeline as a page, a trace and a picture."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fusion_passes.reporting.drawing import write_timeline
from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline

MARKUP = "</script><b>&"


def timeline(buckets: int = 2, ranks: int = 2) -> Timeline:
    """Steps of 10 ms in which each bucket is launched, sent and waited for."""
    names = {f"DDP 0 (Net) bucket {n}": (f"{MARKUP}{n}", "bias") for n in range(buckets)}
    spans = [Span("compute", "compute", 0.0, 0.006)]
    for number, name in enumerate(names):
        at = 0.01 * number / buckets
        long = 0.01 / buckets
        spans += [Span("launch", name, at, at + long / 4), Span("network", name, at, at + long)]
        spans.append(Span("wait", name, at + long / 2, at + long))
    rows = tuple(
        RankSteps(rank, "host", 0.001 * rank, 1e-5 * rank, (0.01,), tuple(spans))
        for rank in range(ranks)
    )
    return Timeline(rows, names, 0.008, (ranks,))


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    write_timeline(timeline(), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|@import|https?://|\bfetch\(|url\(""", text)
    assert text.count("</script>") == 1, "names cannot end the script"
    (data,) = re.findall(r"const data = (\{.*\});\n", text)
    shown = json.loads(data)
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert shown["missing"] == [2]
    second = shown["ranks"][1]
    assert second["startUs"] == 1000.0, "by the clock of rank 0"
    assert set(second["lanes"]) == {*LANES, "exposed"}
    start, long, name = second["lanes"]["network"][1]
    assert (start, long, shown["names"][name]) == (6000.0, 5000.0, "DDP 0 (Net) bucket 1")
    assert shown["parameters"]["DDP 0 (Net) bucket 1"] == [f"{MARKUP}1", "bias"]


def test_what_was_predicted_is_beside_what_was_measured(tmp_path: Path) -> None:
    """From where the network began with the first bucket, on each rank."""
    first, second = timeline().buckets
    predicted = {first: (0.5, 0.501), second: (0.504, 0.507)}
    for item in (one := dataclasses.replace(timeline(), predicted=(predicted,))).ranks:
        shown = [
            (s.name, round(s.start_s, 6), round(s.end_s, 6)) for s in one.predicted_spans(item)
        ]
        assert shown == [(first, 0.0, 0.001), (second, 0.004, 0.007)]
    for name in ("page.html", "trace.json", "picture.png"):
        write_timeline(one, tmp_path / name)
    (data,) = re.findall(r"const data = (\{.*\});\n", (tmp_path / "page.html").read_text())
    lane = json.loads(data)["ranks"][1]["lanes"]["predicted"]
    assert [row[:2] for row in lane] == [[1000.0, 1000.0], [5000.0, 3000.0]], "by rank 0's clock"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "predicted" for event in events) == 4


def test_the_trace_has_a_process_for_each_rank_and_a_track_for_each_lane(tmp_path: Path) -> None:
    write_timeline(timeline(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    shown = [
        (tracks[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X" and event["pid"] == 2
    ]
    assert ("network", "DDP 0 (Net) bucket 1", 6000.0, 5000.0) in [
        (*item[:2], *(round(value, 3) for value in item[2:])) for item in shown
    ]
    assert {track for track, *_ in shown} == {"step", *LANES, "exposed"}
    assert {event["ph"] for event in events} == {"M", "X"}
    # What Perfetto gives a meaning of its own, or takes for one.
    processes, threads = {event["pid"] for event in events}, [tid for _, tid in tracks]
    assert len(set(threads)) == len(threads)
    assert not {0, *processes}.intersection(threads)
    assert 0 not in processes


def test_buckets_that_are_sent_at_once_have_rows_of_their_own_in_the_trace(tmp_path: Path) -> None:
    """Perfetto shows of a thread only what is nested."""
    first, second = timeline().buckets
    spans = [Span("network", first, 0.0, 0.005), Span("network", second, 0.002, 0.007)]
    spans.append(Span("network", first, 0.005, 0.006))
    one = timeline(ranks=1)
    rank = dataclasses.replace(one.ranks[0], spans=tuple(spans))
    write_timeline(dataclasses.replace(one, ranks=(rank,)), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [(names[e["tid"]], e["ts"]) for e in events if e.get("cat") == "network"]
    assert shown == [("network", 0.0), ("network", 5000.0), ("network 2", 2000.0)]


def test_a_trace_begins_at_zero_though_a_rank_began_before_the_first(tmp_path: Path) -> None:
    """Perfetto drops what begins before zero: a step of that rank was missing."""
    one = timeline()
    early = dataclasses.replace(one.ranks[1], start_s=-0.002)
    write_timeline(dataclasses.replace(one, ranks=(one.ranks[0], early)), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {e["pid"]: (e["ts"], e["dur"]) for e in events if e.get("cat") == "step"}
    assert steps == {1: (2000.0, 10000.0), 2: (0.0, 10000.0)}


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    write_timeline(timeline(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(20)
def test_a_thousand_buckets_are_written_at_once(tmp_path: Path) -> None:
    """And linearly: a quadratic search would take minutes."""
    write_timeline(timeline(buckets=1000, ranks=4), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2**20


def test_a_name_that_says_no_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end with one of \.html, \.json, \.png, but"):
        write_timeline(timeline(), "a.svg")
