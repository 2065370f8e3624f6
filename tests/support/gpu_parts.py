"""A small catalog for the tests of ``tools/gpu.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benches.results import Row
from gpu_checks.parts import Check, Part
from testing.scenarios.entries import Scenario


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
    """Hangs with a child process, which must not be left behind."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command, start_new_session=True)
    time.sleep(600)


def wrong(run: Any, *, adds: float = 0.0, failing: tuple[int, ...] = ()) -> None:
    """Returns another gradient under the flag, or raises an error on some ranks."""
    import torch
    import torch.distributed as dist

    if run.is_fused and dist.get_rank() in failing:
        raise ValueError("not while ddp_fusion is set")
    run.backwards.append({"weight": torch.tensor([1.0 + adds * run.is_fused])})


def _measuring(name: str, **options: Any) -> Part:
    return Part(name, f"{__name__}:{name.replace('-', '_')}", **options)


def _check(title: str, target: str, **arguments: Any) -> Check:
    return Check(
        Scenario("gpu", title, target, 2, arguments=tuple(arguments.items())), "concat", "fp32"
    )


TRAINED = "testing.scenarios.features.loops:plain"
WRONG = f"{__name__}:wrong"

PARTS = (
    Part(
        "trains",
        ranks=2,
        checks=(
            _check("a real one", TRAINED),
            _check("another result", WRONG, adds=1.0),
            _check("both ranks fail", WRONG, failing=(0, 1)),
            _check("one rank fails", WRONG, failing=(1,)),
            _check("the same again", TRAINED),
        ),
    ),
    _measuring("is-right"),
    _measuring("is-wrong"),
    _measuring("raises"),
    _measuring("dies"),
    _measuring("hangs", limit_s=9.0),
)
