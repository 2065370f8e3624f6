"""The bench of training steps: its arithmetic, its pages, and what it does when a way fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import bench
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench_steps import pages, plot, processes
from bench_steps.comparing import compare as compare_runs
from bench_steps.figures import Spread, best_cap, fastest, is_balanced, targets
from bench_steps.gradients import compare
from bench_steps.limits import CostTable, earliest_end, lower_bound, ready_shares, table_sizes
from bench_steps.measuring import Effort, Measuring
from bench_steps.processes import Place, RowFailed, RowProcesses, cores_of
from bench_steps.progress import Progress
from bench_steps.results import COMPUTE, NETWORK, PROBE, REFERENCE, Cell, RowResult
from bench_steps.rows import Assignment, Row, Stepped, groups_of, rows_of
from bench_steps.run import Run
from bench_steps.spans import lane_of, merged, timeline_of, without
from bench_steps.timelines import Timeline
from tests.support import bench_ranks
from workloads import models
from workloads.models import MAKERS, TINY, subject, users_subject

MIB = 2**20
CONCAT, COALESCED = Row("way", "concat"), Row("way", "coalesced")
STOCK = Row("way", "torch concat")


# The lower bound


def brute_force(ready: list[float], num_bytes: list[int], costs: CostTable) -> float:
    """The earliest end over all ways to cut the gradients into neighbours."""
    order = sorted(range(len(ready)), key=ready.__getitem__)
    ends = []
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        end, bucket = 0.0, []
        for index, cut in zip(order, [*cuts, True]):
            bucket.append(index)
            if cut:
                start = max(end, max(ready[i] for i in bucket))
                end = start + costs.cost(sum(num_bytes[i] for i in bucket))
                bucket = []
        ends.append(end)
    return min(ends)


seconds = st.floats(0, 10)
gradients = st.lists(st.tuples(seconds, st.integers(1, 1000)), min_size=1, max_size=7)


@given(gradients, st.lists(seconds, min_size=4, max_size=4))
def test_the_recurrence_finds_the_best_of_all_buckets(gradients, costs) -> None:
    table = CostTable.of((1, 10, 100, 1000), costs)
    ready, num_bytes = map(list, zip(*gradients))
    expected = brute_force(ready, num_bytes, table)
    assert earliest_end(ready, num_bytes, table) == pytest.approx(expected)


def test_without_overlap_there_is_one_bucket_and_with_free_launches_one_a_gradient() -> None:
    latency_only = CostTable((1, 100), (1.0, 1.0))
    assert earliest_end([0.0, 1.0, 2.0], [10, 10, 10], latency_only) == 3.0
    by_size = CostTable((1, 100), (0.01, 1.0))
    assert earliest_end([0.0, 1.0, 2.0], [10, 10, 10], by_size) == pytest.approx(2.1)
    assert earliest_end([], [], by_size) == 0.0


def test_a_step_is_never_shorter_than_its_compute() -> None:
    costs = CostTable((1, 100), (0.01, 1.0))
    assert lower_bound(10.0, [0.1], [10], costs) == 10.0
    assert lower_bound(10.0, [1.0], [10], costs) == pytest.approx(10.1)


def test_costs_are_lines_between_sizes_and_never_fall() -> None:
    table = CostTable.of((100, 200, 400), (3.0, 2.0, 4.0))
    assert [table.cost(size) for size in (1, 100, 200, 300, 400, 800)] == [2, 2, 2, 3, 4, 8]


def test_sizes_of_the_table_end_before_the_whole() -> None:
    assert table_sizes(4096 * 4) == (4096,)
    assert table_sizes(4096 * 4 + 1) == (4096, 4096 * 4)


def test_a_gradient_is_ready_when_it_is_on_the_last_rank() -> None:
    fast, slow = [[0.1, 0.4], [0.2, 0.4]], [[0.3, 0.3], [0.3, 0.3]]
    assert ready_shares([fast, slow], [[1.0, 1.0], [1.0, 1.0]]) == pytest.approx([0.3, 0.4])


# Rows


def test_caps_that_hold_all_gradients_are_tried_once() -> None:
    rows = rows_of(["eager DDP", "x"], ["eager DDP"], (25.0, 1.0, 50.0, 100.0), 20 * MIB)
    labels = [row.label for row in rows]
    assert labels == ["eager DDP", "x", "eager DDP, 1 MB", "eager DDP, 25 MB"]
    assert len(rows_of([], ["x"], (1.0, 25.0, 50.0), 25 * MIB + 1)) == 3


def test_groups_are_even_and_start_with_the_first_row() -> None:
    rows = [Row("way", str(number)) for number in range(7)]
    groups = groups_of(rows, 3)
    assert groups[0][0] == rows[0]
    assert sorted(map(len, groups)) == [2, 2, 3]
    assert sorted((row for group in groups for row in group), key=rows.index) == rows


def test_cores_are_shared() -> None:
    assert cores_of(2, [0, 1, 2, 3, 4]) == ((0, 1), (2, 3))
    assert cores_of(3, [4, 5]) == ((4,), (5,), (4,))


def test_an_assignment_survives_the_command_line() -> None:
    given = Assignment(Row("way", "concat", 2.5), "mlp", "tiny", 1, 2, (3,), "host", 9.0)
    assert Assignment.from_json(given.to_json()) == given


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
    cell.note_table(table_sizes(2 * MIB), [[0.001] * 5])
    steps = [Stepped((0.1,), 0.1, ((0.05, 0.1),), (MIB, MIB))] * 2
    cell.note_ready([steps])
    return cell


def run_of(*cells: Cell, **values) -> Run:
    return Run("2026-01-01", "python tools/bench.py", "torch x", "machine", list(cells), **values)


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
        "CPU seconds over compute alone and network alone": True,
        "peak memory over compute alone": True,
        "warm start over compute alone": True,
    }
    ours.ratios = [1.54, 1.54, 1.54]
    ours.peak_bytes, ours.warm_s = 103, 4.9
    met = by_words(cell)
    assert not met["the same, where compute and network are balanced"]
    assert not met["peak memory over compute alone"]
    assert not met["warm start over compute alone"]


def test_slower_than_torchs_within_the_spread_is_reached() -> None:
    stock = result(STOCK, 1.0, 1.0, 1.0, 1.0)
    noisy = cell_of(stock, result(CONCAT, 0.98, 1.02, 1.03, 1.04))
    clear = cell_of(stock, result(CONCAT, 1.02, 1.02, 1.03, 1.04))
    name = "over the best of torch's ways"
    assert not by_words(clear)[name]
    assert by_words(noisy)[name] is False or Spread.of([0.98, 1.02, 1.03, 1.04]).low <= 1.0


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    met = by_words(cell_of(result(CONCAT, 1.2)))
    assert met["over torch's"] is None
    assert met["peak memory over compute alone"] is None
    assert targets(cell_of(result(CONCAT, wrong="off"))) == []


# Pages


def test_the_table_marks_what_is_wrong_and_says_why_a_row_failed() -> None:
    cell = cell_of(
        result(REFERENCE, 2.0),
        result(STOCK, reason="rank 0: InductorError:\n no triton"),
        result(CONCAT, 1.0, wrong="layer.weight is off by 50.0%"),
        result(COALESCED, 1.5, buffers=2),
    )
    text = pages.as_markdown(run_of(cell, failures={"bert": "rank 1 ended with -9"}))
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert lines["| torch concat"].startswith("| torch concat | failed |")
    assert "torch concat: rank 0: InductorError: no triton" in text
    assert lines["| concat"].endswith("| **wrong** |")
    assert "concat: layer.weight is off by 50.0%" in text
    assert lines["| **coalesced**"].endswith("| equal; 2 buffers differ |")
    assert "Not measured: bert: rank 1 ended with -9" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {len(pages.COLUMNS) + 1, 5}


def test_a_picture_is_drawn_whatever_is_in_a_run(tmp_path: Path) -> None:
    cell = cell_of(
        result(REFERENCE, 2.0, 2.1),
        result(Row("way", "eager DDP", 5.0), 1.8),
        result(STOCK, reason="it failed"),
        result(CONCAT, 1.0, wrong="off"),
    )
    path = tmp_path / "bench.png"
    plot.draw(run_of(cell, cell, cell, cell), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_comparison_tells_changes_beyond_the_spread() -> None:
    old = run_of(cell_of(result(CONCAT, 2.0, 2.0), result(STOCK, 1.0, 1.4), result(COALESCED, 1.0)))
    new = run_of(
        cell_of(
            result(CONCAT, 1.0, 1.0),
            result(STOCK, 1.1, 1.5),
            result(COALESCED, wrong="off", reason=""),
            result(REFERENCE, 1.0),
        )
    )
    lines = {line.split(" | ")[1]: line for line in compare_runs(old, new).splitlines()[4:]}
    assert lines["concat"].endswith("| -50.0% |  |")
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
    path = tmp_path / "bench.json"
    run.write(path)
    assert Run.read(path) == run
    assert json.loads(path.read_text())["cells"][0]["lower_bound_s"] > 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "must be a JSON file"), ("[]", "must be a JSON file"), ('{"format": 0}', "Run it anew")],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        Run.read(path)


# Gradients


def gradient_pair() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    expected = {"weight": torch.linspace(-1, 1, 64), "bias": torch.full((4,), 1e-9)}
    return {name: tensor.clone() for name, tensor in expected.items()}, expected


def test_rounding_is_no_difference() -> None:
    gradients, expected = gradient_pair()
    gradients["weight"] *= 1 + 1e-6
    gradients["bias"] *= -3
    assert compare(gradients, expected, {}, {}).error < 1e-3


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.01, float("nan")])
def test_another_gradient_is_found(factor: float) -> None:
    gradients, expected = gradient_pair()
    gradients["weight"] *= factor
    checked = compare(gradients, expected, {}, {})
    assert checked.worst == "weight"
    assert not checked.error <= 1e-3


def test_gradients_of_one_side_and_other_buffers_are_named() -> None:
    gradients, expected = gradient_pair()
    del gradients["bias"]
    buffers = {"mean": torch.ones(2), "count": torch.tensor(3)}
    checked = compare(gradients, expected, buffers, {**buffers, "mean": torch.zeros(2)})
    assert (checked.missing, checked.buffers) == (("bias",), ("mean",))


# Timelines


def test_the_profilers_names_have_lanes() -> None:
    assert lane_of("_c10d_functional::wait_tensor") == "wait"
    assert lane_of("_c10d_functional::all_reduce_") == "launch"
    assert lane_of("c10d::allreduce_") == "launch"
    assert lane_of("gloo:all_reduce") == "network"
    assert lane_of("graph_0_cpp_fused_relu_1") == "compute"
    assert lane_of("## Call CompiledFxGraph f7xk ##") is None


def test_what_holds_a_launch_or_a_wait_is_not_computing_then() -> None:
    assert merged([(2, 3), (0, 1), (1, 2), (5, 6)]) == [(0, 3), (5, 6)]
    assert without([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    timeline = timeline_of(
        [
            ("aten::mm", 0.0, 4.0),
            ("_c10d_functional::all_reduce_", 1.0, 2.0),
            ("aten::empty", 1.2, 1.4),
            ("_c10d_functional::wait_tensor", 4.0, 6.0),
            ("gloo:all_reduce", 1.5, 5.0),
        ],
        6.0,
    )
    busy = {lane: timeline.busy_s(lane) for lane in ("compute", "launch", "wait", "network")}
    assert busy == {"compute": 3.0, "launch": 1.0, "wait": 2.0, "network": 3.5}
    assert timeline.hidden_s() == 2.0


# Models


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_has_a_loss_and_gradients(name: str) -> None:
    made = subject(name, TINY)
    model = made.build()
    model(*made.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    same = [torch.equal(a, b) for a, b in zip(made.batch(0), made.batch(1))]
    assert not all(same), "ranks must have different batches"


def test_models_of_the_bench_have_several_ddp_buckets() -> None:
    sizes = {name: subject(name, models.MEDIUM) for name in MAKERS}
    for name, made in sizes.items():
        num_bytes = sum(p.nbytes for p in made.build().parameters())
        assert 26 * MIB < num_bytes < 100 * MIB, f"{name}: {num_bytes / MIB:.0f} MiB"


def pair_factory():
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)), batch_of


def loss_factory():
    return torch.nn.Linear(2, 2), batch_of, lambda model, batch: model(*batch).sum()


def broken_factory():
    return torch.nn.Linear(2, 2)


def batch_of(seed):
    return [torch.full((1, 2), float(seed))]


@pytest.mark.parametrize("name", ["pair_factory", "loss_factory"])
def test_a_users_factory_is_trained(name: str) -> None:
    made = users_subject(f"{__name__}:{name}")
    model = made.build()
    model(*made.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_factory_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        users_subject("no_such_module:factory")
    with pytest.raises(ValueError, match=r"must return \(model, batch\)"):
        users_subject(f"{__name__}:broken_factory").build()


# Processes, with ranks that measure nothing


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
    assert [row.row.label for row in cell.rows[:3]] == ["no DDP", "network alone", "eager DDP"]
    wrong, unchecked = cell.rows[3:5]
    assert wrong.wrong == "gradients are not eager DDP's: layer.weight is off by 50.0%"
    assert wrong.ratios, "it is measured all the same"
    assert "compared with nothing" in unchecked.wrong
    assert not wrong.is_right


def test_groups_share_the_limits(place: Place) -> None:
    (cell, _), _ = measured(place, ["concat", "coalesced"], together=2, warm=True, caps_mb=(1.0,))
    labels = [row.row.label for row in cell.rows if row.row.kind == "way"]
    assert sorted(labels) == sorted(
        ["no DDP", "eager DDP", "concat", "coalesced"]
        + ["eager DDP, 1 MB", "concat, 1 MB", "coalesced, 1 MB"]
    )
    compute = cell.find(COMPUTE)
    assert compute is not None
    assert len(compute.ratios) == 2 * 4, "in each round of each group"
    assert all(row.cold_s == row.warm_s == 1.0 for row in cell.rows if row.row.kind == "way")
    assert cell.find(PROBE) is not None


def test_ranks_that_hang_are_killed(place: Place) -> None:
    row = RowProcesses(Row("way", bench_ranks.HANGS), place)
    row.ask("start")
    with pytest.raises(RowFailed, match="has not answered for 0.5 s"):
        row.ask("steps", 1, timeout_s=0.5)
    with pytest.raises(RowFailed, match="no processes"):
        row.ask("steps", 1)


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt3"], "model must be one of"),
        (["--rate", "fast"], "--rate must be a number of mbit or gbit"),
        (["--ranks", "1"], "--ranks must be at least 2, but is 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
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


def test_our_rows_decide_the_exit_status() -> None:
    right = run_of(cell_of(result(CONCAT, 1.0), result(STOCK, reason="no triton")))
    assert not bench.has_failed(right)
    assert bench.has_failed(run_of(cell_of(result(CONCAT, 1.0, wrong="off"))))
    assert bench.has_failed(run_of(cell_of(result(CONCAT, reason="it hung"))))
    assert bench.has_failed(run_of(failures={"mlp": "no"}))


@pytest.mark.slow
def test_the_quick_form_measures_and_writes(tmp_path: Path) -> None:
    """Real ranks: eager DDP and one of ours, on the network as it is. Judges no time."""
    options = ["--quick", "--ways", "eager DDP", "concat", "--output", str(tmp_path)]
    assert bench.main([*options, "--timeout", "120"]) == 0
    run = Run.read(tmp_path / "bench.json")
    assert run.failures == {}
    (cell,) = run.cells
    rows = {row.row.label: row for row in cell.rows}
    assert rows.keys() == {"no DDP", "network alone", "eager DDP", "concat", "ready times"}
    assert all(row.is_right and len(row.ratios) == 2 for row in cell.rows)
    assert sum(cell.ready_bytes) == cell.total_bytes
    assert cell.lower_bound_s() is not None
    assert (tmp_path / "bench.png").exists()
    assert "| equal |" in (tmp_path / "bench.md").read_text()
