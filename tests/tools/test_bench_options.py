"""The bench of DDP's options: its table from given figures, and one tiny real run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from bench_steps.processes import Place, RowFailed
from bench_steps.rows import Checked, Row, Stepped
from benches import options
from benches.options import PEER
from benches.results import read_json
from workloads.options import OPTIONS, Branching, LookingUp

TOOL = Path(bench.__file__)
ARGUMENTS = ["--model", "mlp", "--size", "tiny", "--rounds", "3", "--steps", "4"]

STEP_S = {PEER: 0.1, "concat": 0.05, "coalesced": 0.2}


class Ranks:
    """Two ranks that measure nothing. The second is slower by a half, and the machine becomes twice
    as slow with each block."""

    asked: list[tuple[str, ...]]
    fails: dict[str, str]
    error: dict[str, float]
    slowness: float

    def __init__(self, row: Row, place: Place) -> None:
        assert (place.model, place.size, place.ranks) == ("mlp", "tiny", 2)
        self.way, self.blocks = row.way, 0

    def ask(self, command: str, *values: Any) -> list[Any]:
        self.asked.append((self.way, command))
        if self.fails.get(self.way) == command:
            raise RowFailed("rank 0: RuntimeError: no")
        if command == "steps":
            self.blocks += 1
            seconds = STEP_S[self.way] * 2**self.blocks
            return [Stepped((share * seconds,) * values[0], 0.0) for share in (1.0, 1.5)]
        if command == "check":
            assert values[1] == (self.way == PEER)
            return [Checked(), Checked(self.error.get(self.way, 0.0), "layer.weight")]
        return [["not fused"], ["not fused"]] if self.way == "coalesced" else [[], []]

    def end(self) -> None:
        self.asked.append((self.way, "end"))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[Ranks]:
    fresh = type("FreshRanks", (Ranks,), {"asked": [], "fails": {}, "error": {}})
    monkeypatch.setattr(options, "RowProcesses", fresh)
    return fresh


def run(*more: str) -> int:
    return bench.main(["options", *ARGUMENTS, "--option", "static_graph", *more])


def test_figures_are_over_the_peers_of_the_same_round(
    ranks: type[Ranks], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--output", str(tmp_path)) == 0
    said = capsys.readouterr().out
    half, twice = "0.50 (0.50 to 0.50)", "2.00 (2.00 to 2.00)"
    assert f"| mlp | static_graph | equal | {half} | {twice} |" in said
    assert "mlp, static_graph, coalesced: not fused" in said
    assert (tmp_path / "options.md").read_text() == said.removesuffix("\n")
    found = read_json(tmp_path / "options.json", "options")[1]["cells"]["mlp"]["static_graph"]
    assert found["ratios"]["concat"] == pytest.approx([0.5] * 3)
    blocks = [way for way, command in ranks.asked if command == "steps"][3:]
    turn = [PEER, "concat", "coalesced"]
    assert blocks == [*turn[::-1], *turn, *turn[::-1]], "methods take turns"
    assert [command for _, command in ranks.asked[-3:]] == ["end"] * 3


@pytest.mark.parametrize("error", [2e-3, float("inf"), float("nan")])
def test_other_gradients_are_shown_as_wrong(
    ranks: type[Ranks], capsys: pytest.CaptureFixture[str], error: float
) -> None:
    ranks.error = {"concat": error}
    assert run() == 1
    said = capsys.readouterr().out
    assert "| static_graph | **wrong**: concat |" in said
    assert "mlp, static_graph, concat: layer.weight is off by" in said


@pytest.mark.parametrize("command", ["start_option", "steps", "check"])
def test_a_method_that_fails_says_so_and_ends_no_other(
    ranks: type[Ranks], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    ranks.fails = {"concat": command}
    assert run() == 1
    said = capsys.readouterr().out
    assert "mlp, static_graph, concat: rank 0: RuntimeError: no" in said
    assert "2.00 (2.00 to 2.00)" in said


def test_nothing_is_right_without_the_peer(
    ranks: type[Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.fails = {PEER: "start_option"}
    assert run() == 1
    said = capsys.readouterr().out
    assert "**wrong**: DDPOptimizer, concat, coalesced |  |  |" in said
    assert "mlp, static_graph, concat: nothing to compare with" in said


def test_gradients_of_one_side_are_wrong() -> None:
    assert options.difference(Checked(missing=("table.weight",)), 1.0).endswith("table.weight")
    assert options.difference(Checked(1e-4, "layer.weight"), 1e-3) == ""


def test_a_step_is_that_of_the_slowest_rank() -> None:
    assert options.slower_step([(1.0, 5.0, 2.0), (3.0, 1.0, 4.0)]) == 4.0


def test_what_has_no_meaning_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--rounds", "1"], ["--steps", "5"], ["--option", "none such"]):
        with pytest.raises(SystemExit):
            options.main(given)
        assert given[0] in capsys.readouterr().err


def test_models_have_a_use_for_their_option() -> None:
    inputs = OPTIONS["find_unused_parameters, branches"].inputs
    assert [inputs(step, rank) for step in (0, 1) for rank in (0, 1)] == [(0,), (1,), (1,), (0,)]
    model = Branching(torch.nn.Flatten(0))
    model(1, torch.ones(())).backward()
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    assert used == {"branches.1.weight", "branches.1.bias"}
    rows = OPTIONS["sparse embedding"].inputs(0, 0)
    looking_up = LookingUp(torch.nn.Flatten(0))
    looking_up(*rows, torch.ones(())).backward()
    assert looking_up.table.weight.grad is not None
    assert looking_up.table.weight.grad.is_sparse


@pytest.mark.nightly  # Six processes for each option, which compile.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_run_has_the_peers_gradients() -> None:
    command = [sys.executable, str(TOOL), "options", *ARGUMENTS]
    command += ["--option", "find_unused_parameters, branches", "sparse embedding", "join"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = [line for line in said.stdout.splitlines() if line.startswith("| mlp |")]
    assert len(rows) == 3
    assert all(row.split("|")[3].strip() == "equal" for row in rows)
