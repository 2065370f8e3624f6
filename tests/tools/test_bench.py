"""The bench: its figures, its command; and what it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo

import bench
from benches.gradients import compare
from benches.methods import ALONE, Comparison, Method, spread
from benches.processes import Checked
from benches.results import Row, figures_table, number
from workloads import models
from workloads.models import MAKERS, TINY, subject, users_subject
from workloads.ways import EAGER, PLAIN, TRACED

# Figures


def method(name: str, *ratios: float, cap_mb: float | None = None, **values) -> Method:
    """With steps of a tenth of a second times ``ratios``, one for each round."""
    made = Method(name, cap_mb, **values)
    if ratios:
        made.seconds["1gbit"] = [0.1 * ratio for ratio in ratios]
        made.cpu_s["1gbit"] = [0.2 * ratio for ratio in ratios]
    return made


def cell_of(*methods: Method, eager: float = 2.0, **values) -> Comparison:
    plain = method(PLAIN, 1.0, 1.0, 1.0, peak_bytes=100)
    reference = method(EAGER, eager, eager, eager)
    return Comparison("mlp", [plain, reference, *methods], ("1gbit",), **values)


def figures_of(cell: Comparison) -> dict[str, Row]:
    return {row.title.removeprefix("mlp, 1 Gbit/s: "): row for row in cell.rows()}


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert spread([2.0]) == (None, 2.0, None)
    assert spread([]) == (None, None, None)


def test_figures_are_over_no_ddp_in_the_same_round() -> None:
    ours = method("concat", 1.5, 1.4, 1.7, peak_bytes=102)
    cell = cell_of(ours, alone={"1gbit": [0.08] * 3}, alone_cpu_s={"1gbit": [0.1] * 3})
    cell.methods[0].seconds["1gbit"] = [0.1, 0.1, 0.2]
    rows = figures_of(cell)
    figures = rows["concat"].figures
    assert figures["time over no DDP"] == pytest.approx(1.4)
    assert figures["25 %"] == pytest.approx(1.125)
    assert figures["75 %"] == pytest.approx(1.45)
    assert figures["ms"] == pytest.approx(150)
    assert figures["exposed ms"] == pytest.approx(50)
    assert figures["peak over no DDP"] == 1.02
    assert figures["CPU over both alone"] == pytest.approx(1.0)
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


def test_first_steps_and_cpu_seconds_are_over_their_peers() -> None:
    starts = [30.0, 6.0, 8.0, 5.0]
    ours = method("concat", 1.5, 1.4, 1.7, first_s={"1gbit": [0.22, 0.44]}, start_cpu_s=starts)
    cell = cell_of(ours)
    cell.methods[0].start_cpu_s = [20.0, 4.0, 5.0, 6.0]
    cell.methods[1].first_s = {"1gbit": [0.2, 0.4]}
    figures = figures_of(cell)["concat"].figures
    assert figures["first step, ms"] == pytest.approx(330)
    assert figures["first over eager DDP's"] == pytest.approx(1.1)
    assert figures["CPU over no DDP"] == pytest.approx(1.5)
    assert figures["cold start, CPU over no DDP"] == pytest.approx(1.5)
    assert figures["warm start, CPU over no DDP"] == pytest.approx(1.2)


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


@pytest.mark.parametrize(
    ("checked", "words"),
    [
        (Checked(1e-4), ""),
        (Checked(0.5, "layer.weight"), "the gradient of layer.weight is off by 50.0%"),
        (Checked(float("inf"), "layer.weight"), "the gradient of layer.weight is off by inf%"),
        (Checked(missing=("a", "b")), "gradients of other parameters than eager DDP's: a, b"),
        (Checked(compared=False), "compared with nothing: eager DDP failed"),
    ],
)
def test_gradients_of_one_rank_that_differ_make_a_method_wrong(
    checked: Checked, words: str
) -> None:
    made = method("concat", 1.5)
    made.judge([Checked(), checked], 1e-3)
    assert made.wrong == words


def test_a_method_that_planned_for_another_network_has_no_row() -> None:
    auto = method("auto", planned_for="10gbit")
    assert "auto" not in figures_of(cell_of(auto))
    auto.seconds["1gbit"] = [0.1]
    auto.plans["1gbit"] = "2.0 + 4.0 MiB"
    cell = cell_of(auto)
    assert figures_of(cell)["auto"].is_right
    assert [*cell.plans()] == ["mlp, 1 Gbit/s, auto: 2.0 + 4.0 MiB."]


def test_a_table_has_the_columns_that_a_row_has_a_figure_for() -> None:
    rows = [Row("a", figures={"ms": 1.0, "none": None}), Row("b", False, "no", {"GB/s": 2871.4})]
    assert figures_table(rows).splitlines() == [
        "|  | ms | GB/s | remarks |",
        "| --- | ---: | ---: | --- |",
        "| a | 1.00 |  |  |",
        "| b |  | 2871 | **wrong** no |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (1.0, "1.00"), (0.12345, "0.123"), (12.34, "12.3"), (2871.4, "2871"),
     (float("nan"), "")],
)  # fmt: skip
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


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
    class Interrupted:
        def __init__(self, cell, *_):
            cell.methods = cell_of(method("concat", 1.2)).methods
            cell.rates = ("1gbit",)

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "Measuring", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--quick", "--output", str(tmp_path)])
    (cell,) = json.loads((tmp_path / bench.FILE).read_text())["cells"]
    assert cell["methods"][2]["seconds"] == {"1gbit": [0.12]}
    assert "mlp, 1 Gbit/s: concat" in capsys.readouterr().out


# Gradients


@pytest.mark.parametrize(
    ("factor", "is_right"),
    [(1 + 1e-6, True), (0.5, False), (2.0, False), (1.01, False), (float("nan"), False)],
)
def test_rounding_is_no_difference_and_another_gradient_is_one(
    factor: float, is_right: bool
) -> None:
    weight, bias = torch.linspace(-1, 1, 64), torch.full((4,), 1e-9)
    gradients = {"weight": weight * factor, "bias": bias * -3}
    checked = compare(gradients, {"weight": weight, "bias": bias})
    assert (checked.error <= 1e-3) == is_right
    assert checked.worst == "weight" or is_right


def test_gradients_of_one_side_are_named() -> None:
    one = {"weight": torch.ones(2)}
    assert compare(one, {**one, "bias": torch.ones(1)}).missing == ("bias",)


# Models


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_is_one_graph_and_has_a_loss_and_gradients(name: str) -> None:
    made = subject(name, TINY)
    model = made.build()
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(*made.batch(0)).graph_count == 1
    torch._dynamo.reset()
    model(*made.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    same = [torch.equal(a, b) for a, b in zip(made.batch(0), made.batch(1), strict=True)]
    assert not all(same), "ranks must have different batches"


def test_models_of_the_bench_have_several_ddp_buckets() -> None:
    sizes = {name: subject(name, models.MEDIUM) for name in MAKERS}
    for name, made in sizes.items():
        num_bytes = sum(p.nbytes for p in made.build().parameters())
        assert 26 * 2**20 < num_bytes < 100 * 2**20, f"{name}: {num_bytes / 2**20:.0f} MiB"


def pair_factory():
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)), batch_of


def loss_factory():
    return torch.nn.Linear(2, 2), batch_of, lambda model, batch: model(*batch).sum()


def batch_of(seed):
    return [torch.full((1, 2), float(seed))]


@pytest.mark.parametrize("name", ["pair_factory", "loss_factory"])
def test_a_users_factory_is_trained(name: str) -> None:
    made = users_subject(f"{__name__}:{name}")
    model = made.build()
    model(*made.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_factory_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must return \(model, batch\)"):
        users_subject("builtins:dict").build()
