"""The bench's processes, with ranks that measure nothing, and once with real ones."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench
from benches.network import local_network
from benches.processes import Place, cores_of
from benches.results import Row
from tests.support import bench_ranks

RATIO = "time over no DDP"
RATES = ("1 Gbit/s", "10 Gbit/s")


Measured = Callable[..., tuple[dict[str, Row], list[str], dict[str, dict[str, Any]]]]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Run the command at two rates, with ranks that measure nothing. Returns rows by title, the
    rates that were set, and the records of methods by name."""

    def run(ways: list[str], *options: str, worker: str = bench_ranks.__name__) -> Any:
        network, rates = local_network(2), list[str]()
        monkeypatch.setattr(network, "set_rate", rates.append)
        monkeypatch.setattr(bench, "shaped_network", lambda: contextlib.nullcontext(network))
        monkeypatch.setattr(bench, "Place", functools.partial(Place, worker=worker))
        command = ["--quick", "--rate", "1gbit", "10gbit", "--output", str(tmp_path)]
        code = bench.main([*command, "--ways", *ways, *options])
        kept = json.loads((tmp_path / bench.FILE).read_text())
        rows = {row["title"]: Row(**row) for row in kept["rows"]}
        assert code == (not all(row.is_right for row in rows.values()))
        return rows, rates, {method["name"]: method for method in kept["cells"][0]["methods"]}

    return run


def test_a_method_that_fails_says_why_and_ends_no_other(measured: Measured) -> None:
    ways = [bench_ranks.RAISES, bench_ranks.DIES, bench_ranks.HANGS, bench_ranks.WRONG, "concat"]
    rows, rates, _ = measured(ways, "--timeout", "4")
    assert rates == ["unshaped", "1gbit", "10gbit"]
    for rate in RATES:
        words = {way: rows[f"mlp, {rate}: {way}"].words.partition(": ")[2] for way in ways[:3]}
        assert words[bench_ranks.RAISES] == "RuntimeError: this way does not compile"
        assert words[bench_ranks.DIES] == "died with exit code 3: out of everything"
        assert words[bench_ranks.HANGS] == "not done after 4 s"
        wrong = rows[f"mlp, {rate}: {bench_ranks.WRONG}"].words
        assert wrong.endswith("layer.weight is off by 50.0%")
        for name, ratio in (("concat", 1.5), ("eager DDP", 2.0), (bench_ranks.WRONG, 3.0)):
            assert rows[f"mlp, {rate}: {name}"].figures[RATIO] == pytest.approx(ratio)
        assert rows[f"mlp, {rate}: all-reduce alone"].figures["ms"] == pytest.approx(10.0)


def test_auto_is_timed_after_the_steps_that_compare_buckets(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compares on each network."""
    rows, _, _ = measured(["auto"])
    said = capsys.readouterr().out
    for rate in RATES:
        assert f"mlp, {rate}, auto: planned." in said
        assert rows[f"mlp, {rate}: auto"].figures[RATIO] == pytest.approx(1.2)


def test_first_averaged_steps_and_starts_are_measured_in_processes_of_their_own(
    measured: Measured,
) -> None:
    """First steps are measured if the same compiled code runs with and without averaging."""
    ways = ["concat", "concat, traced", "Python reducer"]
    _, _, methods = measured(ways, "--first", "2", "--starts", "2", "--forwards", "2")
    firsts = {name: method["first_s"].get("10gbit") for name, method in methods.items()}
    known = {"no DDP": None, "eager DDP": [0.8, 0.8], "concat": [0.6, 0.6]}
    assert firsts == known | dict.fromkeys(ways[1:])
    starts = [methods[name]["start_cpu_s"] for name in known]
    assert starts == [[0.4] * 3, [0.8] * 3, [0.6] * 3]


def test_nothing_is_measured_without_no_ddp(measured: Measured) -> None:
    rows, rates, _ = measured(["concat"], worker="no_such_module")
    assert rates == ["unshaped"]
    assert "No module named no_such_module" in rows["mlp, 1 Gbit/s: no DDP"].words
    assert not rows["mlp, 1 Gbit/s: no DDP"].is_right


def test_cores_are_shared() -> None:
    assert cores_of(2, [0, 1, 2, 3, 4]) == ((0, 1), (2, 3))
    assert cores_of(3, [4, 5]) == ((4,), (5,), (4,))


@pytest.mark.nightly  # The check runs the quick form as a separate stage.
def test_the_quick_form_measures_and_writes(tmp_path: Path) -> None:
    """Real ranks: eager DDP and ours, on the network without a limit. Judges no time."""
    options = ["--quick", "--ways", "concat", "concat, traced", "--forwards", "2"]
    options += ["--first", "1", "--starts", "1"]
    assert bench.main([*options, "--output", str(tmp_path), "--timeout", "120"]) == 0
    kept = json.loads((tmp_path / bench.FILE).read_text())
    rows = {row["title"].partition(": ")[2]: row for row in kept["rows"]}
    names = ["all-reduce alone", "no DDP", "eager DDP", "concat", "concat, traced"]
    assert [*rows] == names
    assert all(rows[name]["figures"][RATIO] > 0 for name in names[1:])
    assert rows["concat"]["figures"]["first step, ms"] > 0
