"""``python -m fusion_passes.explain`` around a script that knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fusion_passes.reporting.schema import json_schema

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from helper import STEPS
from torch import nn

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
model_compiled = torch.compile(model)
for _ in range(STEPS):
    model_compiled(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
print("the script ends", sys.argv[2:], __name__)
dist.destroy_process_group()
"""


def explain(folder: Path, *options: str, steps: int = 12) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(f"STEPS = {steps}")
    command = [sys.executable, "-m", "fusion_passes.explain", *options]
    return subprocess.run(
        [*command, str(folder / "script.py"), str(folder / "store"), "--its-own"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_a_script_is_run_as_it_is_and_explained(tmp_path: Path) -> None:
    page, trace, report = (tmp_path / name for name in ("a.html", "a.json", "report.json"))
    options = [f"--timeline={page}", f"--timeline={trace}", f"--json={report}"]
    options.append(f"--timeline={tmp_path}/a.png")
    done = explain(tmp_path, "--flag=coalesced", "--steps=2", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script ends ['--its-own'] __main__\n"
    assert "ddp_fusion coalesced: 2 collectives traced, 1 launched a step" in done.stderr
    assert "reduced in the backward compiled with the forward" in done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    jsonschema.validate(found, json_schema())
    assert found["flag"]["mode"] == "coalesced"
    assert found["graphs"][0]["buckets"][0]["times"]["ended_s"] > 0
    assert f"written: {report}" in done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
def test_what_is_known_is_shown_where_the_script_ends_too_soon(tmp_path: Path) -> None:
    done = explain(tmp_path, steps=6)
    assert done.returncode == 0, "it ends under the profiler, which must not crash: " + done.stderr
    assert "1 launched a step" in done.stderr
    assert "the script ended before its steps were recorded" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps=0"], "at least 1, but is '0'"),
        (["--json=/not/there/report.json"], "in a folder that is there, but is '/not/there/rep"),
        (["--timeline=a.svg"], "must end with one of .html, .json, .png, but is 'a.svg'"),
    ],
)
def test_wrong_options_are_refused_in_words(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusion_passes.explain.command import main

    with pytest.raises(SystemExit):
        main([*options, "script.py"])
    assert said in capsys.readouterr().err
