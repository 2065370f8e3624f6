"""``python -m fusion_passes.explain`` with a script that does not use the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fusion_passes.reducer.copies import BESIDE, SEVERAL
from tests.reporting.test_recording import SCHEMA
from tests.support.launch import launch

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from helper import STEPS
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
weight = model.module.weight
model_compiled = torch.compile(model)
for _ in range(STEPS):
    (model_compiled(torch.ones(2, 4)).sum() + weight.sum()).backward()
    model.zero_grad()
if dist.get_rank() != 0:
    sys.exit()
print("the script ends", sys.argv[1:], __name__)
dist.destroy_process_group()
"""


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def explain(
    folder: Path, *options: str, steps: int = 12, ranks: int = 1, **variables: str
) -> tuple[str, str]:
    """Output and errors of the first rank."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(f"STEPS = {steps}")
    command = ["-m", "fusion_passes.explain", *options, str(folder / "script.py"), "--its-own"]
    done = launch(*command, ranks=ranks, **ALONE, **variables)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_script_is_run_as_it_is_and_explained(tmp_path: Path) -> None:
    page, report = tmp_path / "a.html", tmp_path / "report.json"
    options = [f"--timeline={page}", f"--json={report}"]
    output, errors = explain(tmp_path, "--flag=coalesced", "--steps=2", *options, ranks=2)
    assert output == "the script ends ['--its-own'] __main__\n"
    said = " ".join(errors.split())
    assert "DDP 0 (Linear): 2 gradients in 1 bucket, 0 stored there by compiled backwards" in said
    assert f"copied: 1: weight: {SEVERAL}" in said
    assert f"copied: 1: bias: {BESIDE}" in said
    assert "sent, ms" in said
    assert "of DDP 0 (Linear): reduced by the reducer while the backward ran" in said
    found: dict[str, Any] = json.loads(report.read_text())
    jsonschema.validate(found, SCHEMA)
    assert found["flag"]["mode"] == "coalesced"
    assert found["modules"][0]["mode"] == "coalesced"
    assert found["modules"][0]["buckets"][0]["times"]["ended_s"] > 0
    assert f"wrote {report}" in errors
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_what_is_known_is_shown_where_the_script_ends_too_soon(tmp_path: Path) -> None:
    """The script has freed its module by then. Nothing is compiled, which would take most of the
    time."""
    _, errors = explain(tmp_path, steps=6, TORCH_COMPILE_DISABLE="1")
    assert "DDP 0 (Linear): 2 gradients in 1 bucket" in " ".join(errors.split())
    assert "the script ended before its steps were recorded" in errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps=many"], "invalid int value: 'many'"),
        (["--json=/not/there/report.json"], "in a directory that exists, but is '/not/there/rep"),
    ],
)
def test_wrong_options_are_refused_in_words(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusion_passes.explain import main

    with pytest.raises(SystemExit):
        main([*options, "script.py"])
    assert said in capsys.readouterr().err
