"""The bench of starts: one tiny round, really run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bench_starts

TOOL = Path(bench_starts.__file__)


@pytest.mark.slow
def test_a_table_with_three_figures_for_each_method() -> None:
    command = [sys.executable, str(TOOL), "--model", "mlp", "--size", "tiny", "--starts", "1"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert said.returncode == 0, said.stderr
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in said.stdout.splitlines()
    ]
    assert head[2:] == list(bench_starts.METHODS[1:])
    assert [row[1] for row in rows] == ["cold", "warm", "step"]
    assert all(0.3 < float(cell) < 30 for row in rows for cell in row[2:])
    traced, cached = float(rows[1][4]), float(rows[1][3])
    assert cached < traced, "AOTAutograd's cache has the backward"


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_starts.main(["--model", "none"])
    assert "gpt2" in capsys.readouterr().err
