"""The bench of starts: one tiny round, really run."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from torch import nn

import bench
from benches import starts

TOOL = Path(bench.__file__)


def test_figures_are_over_those_without_ddp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: dict[tuple[str, str], int] = {}

    def start(model: str, options: Namespace, method: str, cache: str) -> dict[str, float]:
        assert (model, options.size, options.by_block) == ("mlp", "tiny", False)
        number = asked[method, cache] = asked.get((method, cache), 0) + 1
        cost = 1.0 + starts.METHODS.index(method)
        start, step = cost * (10.0 if number == 1 else 2.0), cost / number
        return {"start": start, "step": step, "collectives": step - 0.125}

    monkeypatch.setattr(starts, "_start", start)
    options = ["--model", "mlp", "--size", "tiny", "--starts", "3", "--output", str(tmp_path)]
    assert starts.main(options) == 0
    assert list(asked.values()) == [4] * len(starts.METHODS), "each method has a cache of its own"
    said = capsys.readouterr().out
    for figure in ("cold", "warm", "step"):
        assert f"| mlp | {figure} | 2.00 | 3.00 | 4.00 |" in said
    assert "| mlp | step, less collectives | 1.00 | 1.00 | 1.00 |" in said
    assert (tmp_path / "starts.md").read_text() == said
    (kept,) = json.loads((tmp_path / "starts.json").read_text())["cells"]["mlp"]
    less = {starts.BARE_STEP: 0.125}
    assert kept["no DDP"] == {"cold": 10.0, "warm": 2.0, "step": 0.25, **less}


def test_one_method_can_be_started_beside_no_ddp_and_each_model_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def start(model: str, options: Namespace, method: str, cache: str) -> dict[str, float]:
        told.append(capsys.readouterr().out)
        cost = {"no DDP": 1.0, "concat": 1.25}[method]
        return {"start": cost, "step": cost, "collectives": 0.0}

    monkeypatch.setattr(starts, "_start", start)
    assert starts.main(["--model", "mlp", "gpt2", "--methods", "concat", "--starts", "1"]) == 0
    told.append(capsys.readouterr().out)
    said = [text for text in told if text]
    assert said[0].endswith("| model |  | concat |\n| --- | --- | ---: |\n")
    assert said[1:] == [
        "".join(f"| {model} | {figure} | 1.25 |\n" for figure in starts.FIGURES)
        for model in ("mlp", "gpt2")
    ]


def test_blocks_are_what_a_model_has_in_lists() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert starts.blocks_of(nn.Sequential(nn.ModuleList(layers), nn.ReLU())) == layers
    with pytest.raises(ValueError, match=r"--by-block needs a model .* Sequential is not"):
        starts.blocks_of(nn.Sequential(*layers))


@pytest.mark.nightly  # Eight processes, half of which compile all anew.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), ("--dynamic",)], ids=["fixed", "dynamic"])
def test_a_table_with_figures_for_each_method(options: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        str(TOOL),
        "starts",
        "--model",
        "mlp",
        "--size",
        "tiny",
        "--starts",
        "1",
        *options,
    ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert said.returncode == 0, said.stderr
    lines = [line for line in said.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head[2:] == list(starts.METHODS[1:])
    assert [row[1] for row in rows] == list(starts.FIGURES)
    assert all(0.3 < float(cell) < 30 for row in rows for cell in row[2:])
    traced, cached = float(rows[1][4]), float(rows[1][3])
    assert cached < traced, "AOTAutograd's cache has the backward"


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        starts.main(["--model", "none"])
    assert "gpt2" in capsys.readouterr().err
