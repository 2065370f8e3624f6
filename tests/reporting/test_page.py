"""The timeline as an HTML page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fusion_passes.reporting.spans import LANES, Span
from fusion_passes.reporting.timeline import RankSteps, Timeline, write_page

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
    write_page(timeline(), tmp_path / "page.html")
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


@pytest.mark.timeout(20)
def test_a_thousand_buckets_are_written_at_once(tmp_path: Path) -> None:
    """The time is linear: a quadratic search would take minutes."""
    write_page(timeline(buckets=1000, ranks=4), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2**20
