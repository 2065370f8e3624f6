"""Compares a training with eager DDP, and returns more than the catalogue of scenarios checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch._inductor.config as inductor_config

from testing.scenarios.both_ways import differences
from testing.scenarios.run import Run

T = TypeVar("T")


def beside_eager(
    train: Callable[..., T], flag: Any, *, tolerance_eps: float = 0.0, **arguments: Any
) -> T:
    """Train with eager DDP and under the flag, and assert that the results are equal; a job for
    every rank.

    Args:
        train: called with a run and the arguments, once for each way.
        flag: value of ``ddp_fusion``.
        tolerance_eps: as in :class:`testing.scenarios.entries.Scenario`.
        arguments: arguments of the function, except the run.

    Returns:
        What the function has returned under the flag.
    """
    eager, fused = (Run(way, torch.float32, torch.device("cpu")) for way in (False, True))
    train(eager, **arguments)
    torch._dynamo.reset()
    with inductor_config.patch(ddp_fusion=flag):
        told = train(fused, **arguments)
    assert differences(fused, eager, tolerance_eps) == []
    return told
