"""The bench: its figures, its command, and its models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import bench
from benches.gradients import TOLERANCE, compare
from benches.methods import ALONE, Comparison, Method
from benches.processes import Checked
from benches.results import Row, figures_table
from workloads import models
from workloads.models import MAKERS, TINY, subject, users_subject
from workloads.ways import EAGER, PLAIN, TRACED

# Figures


def method(name: str, *ratios: float, cap_mb: float | None = None, **values) -> Method:
    """A method with steps of a tenth of a second times ``ratios``, one per round."""
    made = Method(name, cap_mb, **values)
    if ratios:
        made.seconds["1gbit"] = [0.1 * ratio for ratio in ratios]
        made.cpu_s["1gbit"] = [0.2 * ratio for ratio in ratios]
    return made


def cell_of(*methods: Method, **values) -> Comparison:
    plain = method(PLAIN, 1.0, 1.0, 1.0, peak_bytes=100)
    reference = method(EAGER, 2.0, 2.0, 2.0)
    return Comparison("mlp", [plain, reference, *methods], ("1gbit",), **values)


def figures_of(cell: Comparison) -> dict[str, Row]:
    return {row.title.removeprefix("mlp, 1 Gbit/s: "): row for row in cell.rows()}


def test_figures_are_over_no_ddp_and_eager_ddp_in_the_same_round() -> None:
    starts = [30.0, 6.0, 8.0, 5.0]
    firsts = {"1gbit": [0.22, 0.44]}
    ours = method("concat", 1.5, 1.4, 1.7, peak_bytes=102, first_s=firsts, start_cpu_s=starts)
    cell = cell_of(ours, alone={"1gbit": [0.08] * 3}, alone_cpu_s={"1gbit": [0.1] * 3})
    plain, eager = cell.methods[:2]
    plain.seconds["1gbit"] = [0.1, 0.1, 0.2]
    plain.start_cpu_s = [20.0, 4.0, 5.0, 6.0]
    plain.state_bytes, ours.state_bytes = 60, 33
    eager.first_s = {"1gbit": [0.2, 0.4]}
    rows = figures_of(cell)
    assert rows["concat"].figures == pytest.approx(
        {
            "ms": 150,
            "time over no DDP": 1.4,
            "25 %": 1.125,
            "75 %": 1.45,
            "exposed ms": 50,
            "over torch's fastest": 0.75,
            "CPU over both alone": 1.0,
            "CPU over no DDP": 1.5,
            "cold start, CPU over no DDP": 1.5,
            "warm start, CPU over no DDP": 1.2,
            "peak over no DDP": 1.02,
            "optimizer state over no DDP": 0.55,
            "first step, ms": 330,
            "first over eager DDP's": 1.1,
            "gradients off by": None,
        }
    )
    assert rows[ALONE].figures == {"ms": pytest.approx(80)}
    assert rows[PLAIN].figures["CPU over both alone"] is None


def test_ours_are_over_the_fastest_of_torchs_that_is_right_in_pairs_of_rounds() -> None:
    wrong = method("torch overlap", 1.0, 1.0, 1.0, wrong="off by half")
    capped = method("torch concat", 1.1, 1.1, 1.1, cap_mb=5.0)
    traced = method(TRACED, 0.5, 0.5, 0.5)
    fastest = method("DDPOptimizer", 1.5, 1.6, 1.7)
    rows = figures_of(cell_of(method("concat", 1.5, 1.6, 1.7), wrong, capped, traced, fastest))
    assert rows["concat"].figures["over torch's fastest"] == 1.0
    assert rows["torch concat, 5 MB"].figures["over torch's fastest"] == pytest.approx(1.1 / 1.6)


@pytest.mark.parametrize(
    ("other", "is_right"),
    [
        (method("concat", 1.5), True),
        (method("concat", 1.5, wrong="off by half"), False),
        (method("concat", wrong="rank 0 hung"), False),
        (method("concat"), False),
        (method("torch concat", wrong="rank 0: no triton"), True),
        (method("concat, traced", 1.5, wrong="off"), False),
    ],
)
def test_what_is_wrong_with_ours_is_no_right_row(other: Method, is_right: bool) -> None:
    assert all(row.is_right for row in cell_of(other).rows()) == is_right


WEIGHT, BIAS = torch.linspace(-1, 1, 64), torch.full((4,), 1e-9)


def checked(factor: float) -> Checked:
    """A check with an error of this factor times the rounding in the bias."""
    expected = {"weight": WEIGHT, "bias": BIAS}
    return compare({"weight": WEIGHT * factor, "bias": BIAS * -3}, expected)


@pytest.mark.parametrize(
    ("of_a_rank", "words"),
    [
        (checked(1 + 1e-6), ""),
        (checked(0.5), "the gradient of weight is off by 50.0%"),
        (checked(2.0), "the gradient of weight is off by 100.0%"),
        (checked(1.01), "the gradient of weight is off by 1.0%"),
        (checked(float("nan")), "the gradient of weight is off by inf%"),
        (
            compare({"weight": WEIGHT}, {"bias": BIAS}),
            "gradients of other parameters than eager DDP's: bias, weight",
        ),
        (Checked(compared=False), "compared with nothing: eager DDP failed"),
    ],
)
def test_gradients_of_one_rank_that_differ_make_a_method_wrong(
    of_a_rank: Checked, words: str
) -> None:
    made = method("concat", 1.5)
    made.judge([Checked(), of_a_rank], TOLERANCE)
    assert made.wrong == words


def test_a_table_has_the_columns_that_a_row_has_a_figure_for() -> None:
    """Figures have three digits, or more if they are larger."""
    rows = [
        Row("a", False, "no", {"ms": 1.0, "none": None}),
        Row("b", figures={"GB/s": 2871.4}),
        Row("c", figures={"ms": 0.12345, "GB/s": 0.0}),
        Row("d", figures={"ms": 12.34, "GB/s": float("nan")}),
    ]
    assert figures_table(rows).splitlines() == [
        "|  | ms | GB/s | remarks |",
        "| --- | ---: | ---: | --- |",
        "| a | 1.00 |  | **wrong** no |",
        "| b |  | 2871 |  |",
        "| c | 0.123 | 0 |  |",
        "| d | 12.3 |  |  |",
    ]


# The command


@pytest.mark.parametrize("arguments", [["--rate", "1mbit"], ["--rate", "1gbit", "--ranks", "3"]])
def test_a_network_that_is_none_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "--rate" in capsys.readouterr().err


def test_methods_are_at_their_defaults_before_all_with_caps() -> None:
    options = bench._options(["--caps", "1", "5", "--ways", "auto", "concat", EAGER])
    labels = [made.label for made in bench.methods_of(options)]
    defaults = [PLAIN, EAGER, "auto", "concat"]
    assert labels == [
        *defaults,
        *(f"{way}, {cap} MB" for way in (EAGER, "concat") for cap in (1, 5)),
    ]


def test_an_interrupted_run_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(measuring: bench.Measuring) -> None:
        measuring._cell.methods[0].seconds["unshaped"] = [0.12]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Measuring, "run", run)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--quick", "--output", str(tmp_path)])
    (cell,) = json.loads((tmp_path / bench.FILE).read_text())["cells"]
    assert cell["methods"][0]["seconds"] == {"unshaped": [0.12]}
    assert "mlp, unshaped: no DDP" in capsys.readouterr().out


# Models


ONE_LAYER = replace(TINY, layers=1)


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_is_one_graph_and_has_a_loss_and_gradients(name: str) -> None:
    made = subject(name, ONE_LAYER)
    model = made.build()
    assert torch._dynamo.explain(model)(*made.batch(0)).graph_count == 1
    torch._dynamo.reset()
    model(*made.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    same = [torch.equal(a, b) for a, b in zip(made.batch(0), made.batch(1), strict=True)]
    assert not all(same), "ranks must have different batches"


def test_broken_models_break_in_one_level_and_in_two() -> None:
    breaks = []
    for name in ("gpt2-broken", "gpt2-broken-twice"):
        made = subject(name, ONE_LAYER)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(made.build(), backend="eager")(*made.batch(0))
        breaks.append(sum(counters["graph_break"].values()))
    once, twice = breaks
    assert 0 < once < twice


def test_models_of_the_bench_have_several_ddp_buckets() -> None:
    sizes = {name: subject(name, models.MEDIUM) for name in MAKERS}
    for name, made in sizes.items():
        num_bytes = sum(p.nbytes for p in made.build().parameters())
        assert 26 * 2**20 < num_bytes < 100 * 2**20, f"{name}: {num_bytes / 2**20:.0f} MiB"


def loss_factory():
    def batch(seed):
        return [torch.full((1, 2), float(seed))]

    return torch.nn.Linear(2, 2), batch, lambda model, batch: model(*batch).sum()


@pytest.mark.parametrize("name", ["gpu_checks.subjects:tiny_gpt", f"{__name__}:loss_factory"])
def test_a_users_factory_is_trained(name: str) -> None:
    made = users_subject(name)
    model = made.build()
    model(*made.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_factory_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must return \(model, batch\)"):
        users_subject("builtins:dict").build()
