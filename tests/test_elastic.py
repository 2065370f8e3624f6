"""A rank dies, torchrun starts all of them anew, and training goes on with the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.elastic import CHECKPOINT, STEPS
from tests.test_train_job import ROOT, TORCHRUN, environment

DIES_IN = 2

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In the launcher's store, restarted ranks find the addresses of those that died, and Gloo cannot
connect: with eager DDP too (torch 2.13)."""


def run(directory: Path, *arguments: str) -> str:
    directory.mkdir()
    command = [*TORCHRUN, "--max-restarts=1", "-m", "tests.support.elastic", str(directory)]
    result = subprocess.run(
        [sys.executable, *command, *arguments],
        env=environment(**OWN_STORE),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.nightly
def test_training_goes_on_after_a_restart(tmp_path: Path) -> None:
    assert f"steps 0 to {STEPS}, 0 averaged" in run(tmp_path / "eager", "eager")
    said = run(tmp_path / "fused", "concat", str(DIES_IN))
    assert f"steps {DIES_IN} to {STEPS}, {STEPS - DIES_IN} averaged" in said
    eager, fused = (torch.load(tmp_path / name / CHECKPOINT) for name in ("eager", "fused"))
    assert fused["step"] == STEPS
    for name, value in eager["model"].items():
        assert torch.equal(fused["model"][name], value), name
    for number, state in eager["optimizer"]["state"].items():
        momentum = fused["optimizer"]["state"][number]["momentum_buffer"]
        assert torch.equal(momentum, state["momentum_buffer"]), number
