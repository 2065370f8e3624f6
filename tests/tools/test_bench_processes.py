"""The bench's processes, with ranks that measure nothing, and once with real ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import bench
from bench_steps import processes
from bench_steps.measuring import Effort, Measuring
from bench_steps.processes import Place, RowFailed, RowProcesses
from bench_steps.progress import Progress
from bench_steps.results import COMPUTE, PROBE, Cell
from bench_steps.rows import Row
from bench_steps.run import Run
from tests.support import bench_ranks


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(processes, "WORKER", bench_ranks.__name__)
    cores = ((0,), (0,))
    return Place("mlp", "tiny", cores, "127.0.0.1", ((), ()), {}, tmp_path, timeout_s=20.0)


def measured(place: Place, ways: list[str], **effort) -> tuple[list[Cell], list[str | None]]:
    rates: list[str | None] = []
    cells: list[Cell] = []
    given = Effort(**{"rounds": 2, "round_s": 0.1, "together": 20, "warm": False} | effort)
    with Progress() as progress:
        measuring = Measuring(place, given, rates.append, progress)
        measuring.measure(ways, ["1gbit", "10gbit"], cells)
    return cells, rates


def test_a_row_that_fails_says_why_and_ends_no_other(place: Place) -> None:
    place = dataclasses.replace(place, timeout_s=4.0)
    ways = [bench_ranks.RAISES, bench_ranks.DIES, bench_ranks.HANGS, "concat"]
    cells, rates = measured(place, ways)
    assert rates == [None, "1gbit", "10gbit"]
    for cell in cells:
        rows = {row.row.label: row for row in cell.rows}
        reasons = {name: row.reason.partition(" ")[2] for name, row in rows.items()}
        assert reasons[bench_ranks.RAISES][3:] == "RuntimeError: this way does not compile"
        assert reasons[bench_ranks.DIES][2:] == "ended with 3: out of everything"
        assert rows[bench_ranks.HANGS].reason == "rank 0, 1 has not answered for 4 s"
        assert rows["concat"].is_right
        assert rows["concat"].ratios == pytest.approx([1.5, 1.5])
        assert rows["eager DDP"].ratios == pytest.approx([2.0, 2.0])
        assert cell.ready_shares == pytest.approx([0.5, 1.0])
        assert cell.lower_bound_s() is not None


def test_a_row_with_other_gradients_is_marked(place: Place) -> None:
    (cell, _), _ = measured(place, [bench_ranks.WRONG, bench_ranks.UNCHECKED])
    assert [row.row.label for row in cell.rows[:3]] == ["no DDP", "network alone", "ready times"]
    wrong, unchecked = cell.rows[4:6]
    assert wrong.wrong == "gradients are not eager DDP's: layer.weight is off by 50.0%"
    assert wrong.ratios, "it is measured all the same"
    assert "compared with nothing" in unchecked.wrong
    assert not wrong.is_right


def test_groups_share_the_limits(place: Place) -> None:
    (cell, _), _ = measured(place, ["concat", "coalesced"], together=2, warm=True, caps_mb=(1.0,))
    labels = [row.row.label for row in cell.rows if row.row.kind == "way"]
    defaults = ["no DDP", "eager DDP", "concat", "coalesced"]
    capped = [f"{way}, 1 MB" for way in defaults[1:]]
    assert sorted(labels) == sorted([*defaults, *capped])
    compute = cell.find(COMPUTE)
    assert compute is not None
    assert len(compute.ratios) == 2 * 4, "in each round of each group"
    for row in cell.rows:
        twice = row.row.kind == "way" and row.row.cap_mb is None
        assert (row.cold_s, row.warm_s) == ((1.0, 1.0) if twice else (None, None))
    assert cell.find(PROBE) is not None


@pytest.mark.parametrize("warm", [False, True])
def test_auto_is_measured_with_the_buckets_that_a_run_before_has_planned(
    place: Place, warm: bool
) -> None:
    """On each network: it is measured there."""
    cells, _ = measured(place, ["auto"], warm=warm)
    for cell in cells:
        row = cell.find(Row("way", "auto"))
        assert row is not None
        assert row.plan == "planned"
        assert row.ratios == pytest.approx([1.2, 1.2])


def test_the_first_averaged_step_is_measured_in_processes_of_its_own(place: Place) -> None:
    """Where what is compiled without averaging is what runs with it."""
    (cell, _), rates = measured(place, ["concat", "concat, traced"], firsts=2)
    assert rates == [None, "1gbit", "10gbit", "1gbit", "10gbit"]
    found = {row.row.label: row.first_s for row in cell.rows if row.first_s}
    assert found == {"eager DDP": [0.4, 0.4], "concat": [0.3, 0.3]}


def test_ranks_that_hang_are_killed(place: Place) -> None:
    row = RowProcesses(Row("way", bench_ranks.HANGS), place)
    row.ask("start")
    with pytest.raises(RowFailed, match=r"has not answered for 0\.5 s"):
        row.ask("steps", 1, timeout_s=0.5)
    with pytest.raises(RowFailed, match="no processes"):
        row.ask("steps", 1)


@pytest.mark.nightly  # A check runs the quick form as a stage of its own.
def test_the_quick_form_measures_and_writes(tmp_path: Path) -> None:
    """Real ranks: eager DDP and one of ours, on the network as it is. Judges no time."""
    options = ["--quick", "--ways", "eager DDP", "concat", "--output", str(tmp_path)]
    assert bench.main([*options, "--timeout", "120"]) == 0
    run = Run.read(tmp_path / "steps.json")
    assert run.failures == {}
    (cell,) = run.cells
    rows = {row.row.label: row for row in cell.rows}
    assert rows.keys() == {"no DDP", "network alone", "eager DDP", "concat", "ready times"}
    assert all(row.is_right and len(row.ratios) == 2 for row in cell.rows)
    assert sum(cell.ready_bytes) == cell.total_bytes
    bound = cell.lower_bound_s()
    assert bound is not None
    contended = cell.lower_bound_s(contended=True)
    assert contended is not None
    assert contended >= bound
    assert (tmp_path / "steps.png").exists()
    assert "| equal |" in (tmp_path / "steps.md").read_text()
