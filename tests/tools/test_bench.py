"""The bench of training steps: its figures, its pages, and its command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import bench as command
from bench_steps import pages, plot
from bench_steps.comparing import compare as compare_runs
from bench_steps.figures import Spread, best_cap, fastest, is_balanced, targets
from bench_steps.results import COMPUTE, NETWORK, REFERENCE, Cell, RowResult
from bench_steps.rows import Row, Stepped
from bench_steps.run import Run
from bench_steps.timelines import Timeline
from benches import steps as bench
from benches.results import Origin, keep, page, read_json, table
from fusion_passes.profile.tables import MIB, Taken, table_sizes
from fusion_passes.reporting.spans import timeline_of
from interrupting import INTERRUPTED
from workloads.ways import TRACED

CONCAT, COALESCED = Row("way", "concat"), Row("way", "coalesced")
STOCK = Row("way", "torch concat")


# Figures


def result(row: Row, *ratios: float, **values) -> RowResult:
    made = RowResult(row, **values)
    for ratio in ratios:
        made.add(ratio * 0.1, ratio, 0.2)
    return made


def cell_of(*rows: RowResult) -> Cell:
    compute = result(COMPUTE, 1.0, 1.0, 1.0, peak_bytes=100, warm_s=4.0)
    network = result(NETWORK, 0.8, 0.8, 0.8)
    cell = Cell("mlp", "1gbit", 2, (MIB, MIB), [compute, network, *rows])
    cell.note_table(table_sizes(2 * MIB, 4), [[0.001] * 6])
    steps = [Stepped((0.1,), 0.1, ((0.05, 0.1),), (MIB, MIB))] * 2
    cell.note_ready([steps])
    return cell


def run_of(*cells: Cell, **values) -> Run:
    origin = Origin("2026-01-01", "python tools/bench.py", "torch x", "machine")
    return Run(origin, list(cells), **values)


def by_words(cell: Cell) -> dict[str, bool | None]:
    return {target.words.split(" (")[0]: target.is_met for target in targets(cell)}


def test_a_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_what_is_wrong_or_failed_is_never_the_fastest() -> None:
    fast = result(CONCAT, 1.0, wrong="off by half")
    failed = result(STOCK, 0.5, reason="it hung")
    right = result(COALESCED, 2.0)
    assert fastest([fast, failed, right, RowResult(REFERENCE)]) is right
    assert fastest([fast, failed]) is None


def test_the_best_cap_is_of_the_way_itself() -> None:
    one = result(Row("way", "concat", 1.0), 1.5)
    five = result(Row("way", "concat", 5.0), 1.3)
    other = result(Row("way", "coalesced", 5.0), 1.1)
    assert best_cap(cell_of(result(CONCAT, 1.2), one, five, other), "concat") is five
    assert best_cap(cell_of(result(CONCAT, 1.2)), "concat") is None


def test_targets_compare_the_best_of_ours_with_the_best_of_torchs() -> None:
    # The bound: a gradient that is ready at the end costs some 0.04 s beyond the compute of 0.1 s.
    ours = result(CONCAT, 1.5, 1.5, 1.5, peak_bytes=102, warm_s=4.8)
    slower = result(COALESCED, 1.9, 1.9, 1.9, peak_bytes=500)
    cell = cell_of(result(REFERENCE, 2.0, 2.0, 2.0), result(STOCK, 1.8, 1.8, 1.8), ours, slower)
    assert is_balanced(cell)
    assert by_words(cell) == {
        "over the best of torch's ways": True,
        "the same, where compute and network are balanced": True,
        "over the lower bound": False,
        "over the lower bound with contention": None,
        "CPU seconds over compute alone and network alone": True,
        "peak memory over compute alone": True,
        "warm start over compute alone": True,
    }
    cell.note_taken([Taken(1, 1), Taken(10**6, 10**3), Taken(10**7, 10**3)])
    assert cell.taken == Taken(10**6, 10**3)
    assert by_words(cell)["over the lower bound with contention"] is False
    ours.ratios = [1.54, 1.54, 1.54]
    ours.peak_bytes, ours.warm_s = 103, 4.9
    met = by_words(cell)
    assert not met["the same, where compute and network are balanced"]
    assert not met["peak memory over compute alone"]
    assert not met["warm start over compute alone"]


def test_slower_than_torchs_is_missed_only_beyond_the_spread() -> None:
    stock = result(STOCK, 1.0, 1.0, 1.0, 1.0, 1.0)
    noisy = cell_of(stock, result(CONCAT, 0.97, 0.98, 1.02, 1.03, 1.04))
    clear = cell_of(stock, result(CONCAT, 0.97, 1.01, 1.02, 1.03, 1.04))
    name = "over the best of torch's ways"
    assert by_words(noisy)[name], "a quarter of the rounds were not slower"
    assert not by_words(clear)[name]


def test_a_backward_traced_without_ddp_is_shown_but_is_no_way_to_reduce() -> None:
    traced, ours = result(Row("way", TRACED), 0.5, 0.5, peak_bytes=110), result(CONCAT, 1.5, 1.5)
    cell = cell_of(traced, result(STOCK, 1.8, 1.8), ours)
    assert targets(cell)[0].words == "over the best of torch's ways (torch concat)"
    text = pages.as_markdown(run_of(cell))
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {TRACED} |")]
    assert "| 1.10 |" in line, "its peak memory over compute alone"
    assert line.endswith("|  |"), "its gradients are those of one rank: there is nothing to compare"


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    met = by_words(cell_of(result(CONCAT, 1.2)))
    assert met["over torch's"] is None
    assert met["peak memory over compute alone"] is None
    assert targets(cell_of(result(CONCAT, wrong="off"))) == []


# Pages


def test_the_table_marks_what_is_wrong_and_says_why_a_row_failed() -> None:
    cell = cell_of(
        result(REFERENCE, 2.0),
        result(STOCK, reason="rank 0: InductorError: no triton\n\nSet this."),
        result(CONCAT, 1.0, wrong="layer.weight is off by 50.0%"),
        result(COALESCED, 1.5, buffers=2),
    )
    text = pages.as_markdown(run_of(cell, failures={"bert": "rank 1 ended with -9"}))
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert lines["| torch concat"].startswith("| torch concat | failed |")
    assert "torch concat: rank 0: InductorError: no triton\n" in text
    assert lines["| concat"].endswith("| **wrong** |")
    assert "concat: layer.weight is off by 50.0%" in text
    assert lines["| **coalesced**"].endswith("| equal; 2 buffers differ |")
    assert "Not measured: bert: rank 1 ended with -9" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {len(pages.COLUMNS) + 1, 5}


def test_the_first_averaged_step_is_over_eager_ddps_of_its_round() -> None:
    cell = cell_of(
        result(REFERENCE, 2.0, first_s=[0.2, 0.4]), result(CONCAT, 1.5, first_s=[0.22, 0.44])
    )
    text = pages.as_markdown(run_of(cell))
    assert "| concat | 330.0 | 1.10 (1.10 to 1.10) |" in text


def test_a_picture_is_drawn_whatever_is_in_a_run(tmp_path: Path) -> None:
    cell = cell_of(
        result(REFERENCE, 2.0, 2.1),
        result(Row("way", "eager DDP", 5.0), 1.8),
        result(STOCK, reason="it failed"),
        result(CONCAT, 1.0, wrong="off"),
    )
    path = tmp_path / "steps.png"
    plot.draw(run_of(cell, cell, cell, cell), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_comparison_tells_changes_beyond_the_spread() -> None:
    eager = Row("way", "eager DDP")
    was = [result(CONCAT, 2.0, 2.0), result(STOCK, 1.0, 1.4), result(COALESCED, 1.0)]
    now = [result(CONCAT, 1.0, 1.0), result(STOCK, 1.1, 1.5), result(COALESCED, reason="hung")]
    slower = Row("way", "DDPOptimizer")
    old = run_of(cell_of(*was, result(slower, 1.0)))
    new = run_of(cell_of(*now, result(slower, 2.0), result(eager, 1.0)))
    lines = {line.split(" | ")[1]: line for line in compare_runs(old, new).splitlines()[4:]}
    assert lines["concat"].endswith("| -50.0% |  |")
    assert lines["DDPOptimizer"].endswith("| +100.0% |  |")
    assert lines["torch concat"].endswith("| within the spread |")
    assert "equal, now failed" in lines["coalesced"]
    assert "eager DDP" not in lines
    assert "no row is in both runs" in compare_runs(run_of(), new)


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    span = timeline_of([("aten::mm", 0.0, 0.1)], 0.2)
    run = run_of(
        cell_of(result(Row("way", "concat", 5.0), 1.0)),
        failures={"bert": "no"},
        timelines=[Timeline("mlp", "concat", (span,))],
    )
    path = tmp_path / "steps.json"
    run.write(path)
    assert Run.read(path) == run
    assert json.loads(path.read_text())["cells"][0]["lower_bound_s"] > 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a JSON file"),
        ("[]", "must be a JSON file"),
        ('{"format": 0}', "Run it anew"),
        ('{"format": 1}', "must say its date"),
        ('{"format": 1, "part": "passes"}', "must be of the part steps"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Run.read(path)


def test_results_that_name_no_part_are_steps() -> None:
    kept = list(Path("docs/bench").glob("*.json"))
    steps = [path for path in kept if json.loads(path.read_text()).get("part", "steps") == "steps"]
    assert 0 < len(steps) < len(kept)
    assert all(Run.read(path).cells for path in steps)


# The command


def test_each_part_has_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for part in command.PARTS:
        with pytest.raises(SystemExit) as ended:
            command.main([part, "--help"])
        assert ended.value.code == 0
        assert "--output DIR" in capsys.readouterr().out


def test_the_steps_are_what_no_name_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "--ranks", "1"])
    assert "--ranks must be at least 2" in capsys.readouterr().err


def test_another_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["stores"]) == command.WRONG_USE
    assert "steps, storage, passes, scaling, starts" in capsys.readouterr().err


def test_a_page_and_its_figures_are_kept(tmp_path: Path) -> None:
    origin = Origin.here("scaling", ["--ranks", "3"])
    assert origin.command == "python tools/bench.py scaling --ranks 3"
    text = page("Title", origin, "Words.", "", table(["a", "b"], [["x", "1"]]))
    assert text.endswith(
        "`python tools/bench.py scaling --ranks 3`.\n\nWords.\n\n| a | b |\n"
        "| --- | ---: |\n| x | 1 |\n"
    )
    keep(tmp_path, "scaling", origin, {"cells": [1.5]}, text)
    assert read_json(tmp_path / "scaling.json", "scaling") == (origin, {"cells": [1.5]})
    assert (tmp_path / "scaling.md").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt3"], "model must be one of"),
        (["--rate", "fast"], "--rate must be a number of mbit or gbit"),
        (["--ranks", "1"], "--ranks must be at least 2, but is 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--forwards", "0"], "--forwards must be at least 1"),
        (["--round-seconds", "0"], "--round-seconds must be more than 0"),
        (["--caps", "-1"], "--caps must be more than 0 MB"),
        (["--compare", "/no/such.json"], "must be a JSON file"),
    ],
)
def test_a_bad_option_is_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--quick", *arguments])
    assert words in capsys.readouterr().err


def test_an_interrupted_run_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __init__(self, *_, **__):
            pass

        def measure(self, ways, rates, cells):
            cells += [cell_of(result(CONCAT, 1.2)), Cell("mlp", "10gbit", 2, (1,))]
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench, "Measuring", Interrupted)
    assert bench.main(["--quick", "--output", str(tmp_path)]) == INTERRUPTED
    assert [cell.rate for cell in Run.read(tmp_path / "steps.json").cells] == ["1gbit"]
    assert "## mlp, 1gbit" in capsys.readouterr().out
    assert (tmp_path / "steps.png").exists()


def test_our_rows_decide_the_exit_status() -> None:
    right = run_of(cell_of(result(CONCAT, 1.0), result(STOCK, reason="no triton")))
    assert not bench.has_failed(right)
    assert bench.has_failed(run_of(cell_of(result(CONCAT, 1.0, wrong="off"))))
    assert bench.has_failed(run_of(cell_of(result(CONCAT, reason="it hung"))))
    assert bench.has_failed(run_of(failures={"mlp": "no"}))
