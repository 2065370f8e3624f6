"""The bench's processes, with ranks that measure nothing, and once with real ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import bench
from benches.methods import Comparison
from benches.network import local_network
from benches.processes import Place, cores_of
from benches.results import Row
from tests.support import bench_ranks

RATIO = "time over no DDP"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, 20.0, ((0,), (0,)), model="mlp", worker=bench_ranks.__name__)


def measured(
    place: Place, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, Row], list[str], Comparison]:
    """Rows by title, the rates that were set, and all that was measured."""
    common = ["--rate", "1gbit", "10gbit", "--rounds", "2", "--round-seconds", "0.1"]
    monkeypatch.setattr(bench, "Place", lambda **given: dataclasses.replace(
        place, **{name: given[name] for name in ("variables", "timeout_s", "forwards")}
    ))  # fmt: skip
    options = bench._options(["--quick", *common, *arguments])
    network, rates = local_network(2), list[str]()
    monkeypatch.setattr(network, "set_rate", rates.append)
    cell = Comparison("mlp", bench.methods_of(options), tuple(options.rate))
    try:
        bench.Measuring(cell, options, network, place.directory).run()
    finally:
        for method in cell.methods:
            method.kill()
    return {row.title: row for row in cell.rows()}, rates, cell


def test_a_method_that_fails_says_why_and_ends_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [bench_ranks.RAISES, bench_ranks.DIES, bench_ranks.HANGS, bench_ranks.WRONG, "concat"]
    rows, rates, _ = measured(place, monkeypatch, "--timeout", "4", "--ways", *ways)
    assert rates == ["unshaped", "1gbit", "10gbit"]
    for rate in ("1 Gbit/s", "10 Gbit/s"):
        words = {way: rows[f"mlp, {rate}: {way}"].words.partition(" ")[2] for way in ways}
        assert words[bench_ranks.RAISES][3:] == "RuntimeError: this way does not compile"
        assert words[bench_ranks.DIES][2:] == "ended with 3: out of everything"
        assert words[bench_ranks.HANGS] == "0, 1 has not answered for 4 s"
        assert words[bench_ranks.WRONG].endswith("layer.weight is off by 50.0%")
        for name, ratio in (("concat", 1.5), ("eager DDP", 2.0), (bench_ranks.WRONG, 3.0)):
            assert rows[f"mlp, {rate}: {name}"].figures[RATIO] == pytest.approx(ratio)
        assert rows[f"mlp, {rate}: all-reduce alone"].figures["ms"] == pytest.approx(10.0)


def test_auto_is_measured_with_the_buckets_that_a_run_before_has_planned(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each network: it is measured there."""
    rows, _, cell = measured(place, monkeypatch, "--ways", "auto")
    for rate in ("1 Gbit/s", "10 Gbit/s"):
        row = rows[f"mlp, {rate}: auto"]
        assert f"mlp, {rate}, auto: planned." in cell.plans()
        assert row.figures[RATIO] == pytest.approx(1.2)


def test_first_averaged_steps_and_starts_are_measured_in_processes_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First steps where what is compiled without averaging is what runs with it."""
    ways = ["concat", "concat, traced", "Python reducer"]
    more = ["--first", "2", "--starts", "2", "--forwards", "2"]
    rows, rates, cell = measured(place, monkeypatch, "--ways", *ways, *more)
    assert rates[0] == "unshaped"
    firsts = {method.name: method.first_s.get("10gbit") for method in cell.methods}
    known = {"no DDP": None, "eager DDP": [0.8, 0.8], "concat": [0.6, 0.6]}
    assert firsts == known | dict.fromkeys(ways[1:])
    starts = [method.start_cpu_s for method in cell.methods[:3]]
    assert starts == [[0.4] * 3, [0.8] * 3, [0.6] * 3]
    figures = rows["mlp, 1 Gbit/s: concat"].figures
    assert figures["first over eager DDP's"] == pytest.approx(0.75)
    assert figures["warm start, CPU over no DDP"] == pytest.approx(1.5)


def test_nothing_is_measured_without_no_ddp(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(place, worker="no_such_module")
    rows, rates, cell = measured(missing, monkeypatch, "--ways", "concat")
    assert rates == ["unshaped"]
    assert "No module named no_such_module" in cell.methods[0].wrong
    assert not rows["mlp, 1 Gbit/s: no DDP"].is_right


def test_cores_are_shared() -> None:
    assert cores_of(2, [0, 1, 2, 3, 4]) == ((0, 1), (2, 3))
    assert cores_of(3, [4, 5]) == ((4,), (5,), (4,))


@pytest.mark.nightly  # A check runs the quick form as a stage of its own.
def test_the_quick_form_measures_and_writes(tmp_path: Path) -> None:
    """Real ranks: eager DDP and ours, on the network as it is. Judges no time."""
    options = ["--quick", "--ways", "concat", "concat, traced", "--forwards", "2"]
    options += ["--first", "1", "--starts", "1"]
    assert bench.main([*options, "--output", str(tmp_path), "--timeout", "120"]) == 0
    kept = json.loads((tmp_path / bench.FILE).read_text())
    rows = {row["title"].partition(": ")[2]: row for row in kept["rows"]}
    names = ["all-reduce alone", "no DDP", "eager DDP", "concat", "concat, traced"]
    assert [*rows] == names
    assert all(row["is_right"] for row in rows.values())
    assert all(rows[name]["figures"][RATIO] > 0 for name in names[1:])
    assert rows["concat"]["figures"]["first step, ms"] > 0
