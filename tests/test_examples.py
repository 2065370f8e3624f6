"""The small examples and those of trainers: each runs as its page says, and is fused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch

from tests.support.launch import ROOT, launch

SMALL: Final = ROOT / "examples" / "small"
TRAINERS: Final = ROOT / "examples" / "trainers"
RANKS: Final = {"tensor_parallel": 4}


def test_all_are_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    paths = [*SMALL.glob("*.py"), *TRAINERS.glob("*.py")]
    assert all(f"({path.relative_to(ROOT / 'examples')})" in listed for path in paths)


@pytest.mark.slow
@pytest.mark.nightly  # tests/reporting/test_explain.py tests the command under torchrun.
@pytest.mark.parametrize("name", sorted(path.stem for path in SMALL.glob("*.py")))
def test_an_example_is_fused(name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["-m", "fusion_passes.explain", "--steps=2", f"--json={report}"]
    launch(*command, str(SMALL / f"{name}.py"), ranks=RANKS.get(name, 2))
    found = json.loads(report.read_text())
    assert found["warnings"] == []
    assert any(module["buckets"] for module in found["modules"])
    assert found["totals"]["launches"] < found["totals"]["gradients"]
    assert found["totals"]["steps"]["network_s"] > 0, "steps were recorded"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted({path.stem for path in TRAINERS.glob("*.py")} - {"common"}))
def test_a_trainer_needs_nothing_but_the_flag(name: str, tmp_path: Path) -> None:
    weights = {}
    for flag in ("", "concat"):
        files = [tmp_path / f"weights{flag}.pt", tmp_path / f"report{flag}.json"]
        command = [str(TRAINERS / f"{name}.py"), *map(str, files)]
        launch(*command, ranks=2, FUSION_PASSES_DDP_FUSION=flag)
        weights[flag] = torch.load(files[0])
        report = json.loads(files[1].read_text())
    assert report["warnings"] == []
    assert report["totals"]["gradients"] >= 41, "one for each parameter"
    assert report["totals"]["launches"] == 1
    for parameter, value in weights[""].items():
        # Another compile may round sums differently. 8 steps of SGD move weights by 1e-3.
        torch.testing.assert_close(weights["concat"][parameter], value, rtol=1e-6, atol=1e-7)
