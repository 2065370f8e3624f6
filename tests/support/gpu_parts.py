"""A small catalog for the tests of ``tools/gpu.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benches.results import Row
from gpu_checks.parts import Check, Part
from testing.scenarios.entries import Scenario

PID_FILE = "GPU_TEST_PID_FILE"
"""Environment variable: where :func:`hangs` writes which process it has started."""


def is_right(site: Any, note: Any) -> None:
    note(Row("right", words=site.device, figures={"GB/s": 12.34, "of the copy": None}))


def is_wrong(site: Any, note: Any) -> None:
    note(Row("first", figures={"GB/s": 1.0}))
    note(Row("wrong", False, "values differ"))


def raises(site: Any, note: Any) -> None:
    note(Row("what there was before", figures={"GB/s": 2.0}))
    raise RuntimeError("no memory is left")


def dies(site: Any, note: Any) -> None:
    os._exit(3)


def hangs(site: Any, note: Any) -> None:
    """With a process of its own, which must not be left behind."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    Path(os.environ[PID_FILE]).write_text(str(child.pid))
    time.sleep(600)


def _record(run: Any, value: float) -> None:
    import torch

    run.backwards.append({"weight": torch.tensor([value])})


def differs(run: Any) -> None:
    _record(run, 2.0 if run.is_fused else 1.0)


def refuses(run: Any) -> None:
    if run.is_fused:
        raise ValueError("fake=True is not supported while ddp_fusion is set: leave it out.")
    _record(run, 1.0)


def refuses_on_one_rank(run: Any) -> None:
    import torch.distributed as dist

    if run.is_fused and dist.get_rank() == 1:
        raise ValueError("ddp_fusion does not like rank 1")
    _record(run, 1.0)


def _measuring(name: str, **options: Any) -> Part:
    return Part(name, f"{__name__}:{name.replace('-', '_')}", **options)


def _check(title: str, target: str) -> Check:
    return Check(Scenario("gpu", title, target, 2), "concat", "fp32")


PARTS = (
    Part(
        "trains",
        ranks=2,
        checks=(
            _check("a real one", "testing.scenarios.features.loops:plain"),
            _check("another result", f"{__name__}:differs"),
            _check("both ranks fail", f"{__name__}:refuses"),
            _check("one rank fails", f"{__name__}:refuses_on_one_rank"),
            _check("the same again", "testing.scenarios.features.loops:plain"),
        ),
    ),
    _measuring("is-right"),
    _measuring("is-wrong"),
    _measuring("raises"),
    _measuring("dies"),
    _measuring("hangs", limit_s=9.0),
)
