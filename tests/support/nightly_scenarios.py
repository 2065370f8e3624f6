"""A small catalog for the tests of ``tools/nightly.py``: nothing in it is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_passes import FusionWarning
from testing.scenarios.entries import Scenario
from testing.scenarios.run import Run

PID_FILE = "NIGHTLY_TEST_PID_FILE"
"""Environment variable: where :func:`hangs` writes which process it has started."""


def _scenario(feature: str, *, ranks: int = 1, **options: Any) -> Scenario:
    target = f"{__name__}:{feature.replace('-', '_')}"
    return Scenario("fake", feature, f"what {feature}", target, ranks=ranks, **options)


def _record(run: Run, value: float) -> None:
    run.backwards.append({"weight": torch.tensor([value])})


def is_warned(run: Run) -> None:
    _record(run, 1.0)
    if run.is_fused:
        graph = torch._inductor.config.ddp_fusion.backward_graph
        words = f"Not fused, because it is fake and has {graph}. Do without."
        warnings.warn(words, FusionWarning, stacklevel=1)


def is_silent(run: Run) -> None:
    _record(run, 1.0)


def differs(run: Run) -> None:
    _record(run, 2.0 if run.is_fused else 1.0)


def refuses(run: Run) -> None:
    if run.is_fused:
        raise ValueError("fake=True is not supported while ddp_fusion is set: leave it out.")
    _record(run, 1.0)


def raises(run: Run) -> None:
    _record(run, 1.0)
    if run.is_fused:
        raise RuntimeError("this one names no flag\nand has a second line")


def refuses_on_one_rank(run: Run) -> None:
    if run.is_fused and dist.get_rank() == 1:
        raise ValueError("ddp_fusion does not like rank 1")
    _record(run, 1.0)


def dies(run: Run) -> None:
    if run.is_fused:
        os._exit(3)


def hangs(run: Run) -> None:
    """With a process of its own, which must not be left behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ[PID_FILE]).write_text(str(child.pid))
    time.sleep(600)


SCENARIOS = (
    _scenario("is-warned", quick=("concat", "coalesced")),
    _scenario("differs", dtypes=("fp32", "bf16")),
    _scenario("refuses", quick=("concat",)),
    _scenario("raises"),
    _scenario("refuses-on-one-rank", ranks=2),
    _scenario("dies"),
    _scenario("hangs"),
)
