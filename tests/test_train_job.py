"""The example: a small run with the real launcher, its gradient check, and Ctrl-C."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from byte_gpt import training
from byte_gpt.gradient_check import TOLERANCE, compare_gradients
from byte_gpt.options import parse_options
from tests.support.launch import ROOT, environment, launch

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
SMALL = ("--layers=1", "--width=32", "--batch=2", "--context=16", "--steps=8")


@pytest.mark.slow
@pytest.mark.nightly  # .ci/run trains it with its own launcher.
def test_trains_fused_under_torchrun(tmp_path):
    timeline = tmp_path / "timeline.html"
    ways = ("--fusion=concat", "--style=inside", f"--timeline={timeline}")
    result = launch(SCRIPT, *ways, *SMALL, ranks=2)

    parameters = 2 + 4 + 4 + 2 + 1  # embeddings; a block's norms and linears; norm; head
    assert re.search(rf"\b{parameters}\b\D+\b1\b", result.stdout), result.stdout
    assert "head.weight" in result.stdout
    assert "a step: " in result.stdout, "some were recorded"
    assert "<!doctype html>" in timeline.read_text()
    assert "tokens/s" in result.stderr


def test_wrong_option_is_refused_in_words(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--width=33"])
    assert "--width: must be a multiple of 32" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for orphans in /proc")
@pytest.mark.usefixtures("started")
def test_interrupt_ends_all_processes():
    job = subprocess.Popen(
        [sys.executable, SCRIPT, "--steps=100000", "--fusion=none"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith("torch ")
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=30)

    assert job.returncode == 130
    assert "Traceback" not in errors


GRADIENT = {
    "weight": torch.tensor([4.0, -2.0, 0.5]),
    "bias": torch.tensor([0.0, 1.0]),
    "unused": torch.zeros(2),
}


def changed(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**GRADIENT, **tensors}


@pytest.mark.parametrize(
    ("actual", "parameter"),
    [
        pytest.param(GRADIENT, "", id="equal"),
        pytest.param(changed(weight=GRADIENT["weight"] * (1 + TOLERANCE / 2)), "", id="rounding"),
        pytest.param(changed(weight=GRADIENT["weight"] * (1 + 2 * TOLERANCE)), "weight", id="off"),
        pytest.param(changed(weight=GRADIENT["weight"] * 2), "weight", id="not averaged"),
        pytest.param(changed(bias=torch.tensor([0.0, math.nan])), "bias", id="nan"),
        pytest.param(changed(bias=torch.tensor([0.0, math.inf])), "bias", id="inf"),
        pytest.param(changed(bias=torch.zeros(3)), "bias", id="shape"),
        pytest.param(changed(unused=torch.tensor([0.0, 1e-30])), "unused", id="must be zero"),
        pytest.param({**GRADIENT, "extra": torch.zeros(1)}, "extra", id="unexpected"),
        pytest.param({"weight": GRADIENT["weight"]}, "bias", id="missing"),
    ],
)
def test_gradients_are_those_of_eager_ddp_or_the_parameter_is_named(actual, parameter):
    difference = compare_gradients(1, actual, GRADIENT)

    assert difference.ok == (not parameter)
    sentences = training.failures([difference], before=2.0, after=1.0)
    assert len(sentences) == bool(parameter)
    named = f"In step 1 the gradient of {parameter} is not eager DDP's"
    assert all(sentence.startswith(named) for sentence in sentences)


@pytest.mark.parametrize("after", [2.0, 3.0, math.nan])
def test_loss_that_does_not_fall_fails(after):
    (sentence,) = training.failures([], before=2.0, after=after)

    assert sentence.startswith("The loss did not fall")


@pytest.mark.parametrize(("factor", "exit_code"), [(1.0, 0), (2.0, 1)])
def test_exit_code_follows_the_gradients(monkeypatch, capsys, factor, exit_code):
    """One rank, uncompiled; the gradients of the run are multiplied by the factor."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(
        training,
        "compare_gradients",
        lambda step, actual, expected: compare_gradients(
            step, {name: gradient * factor for name, gradient in actual.items()}, expected
        ),
    )

    assert training.train(parse_options([*SMALL, "--fusion=none"])) == exit_code
    assert ("FAILED" in capsys.readouterr().out) == bool(exit_code)
