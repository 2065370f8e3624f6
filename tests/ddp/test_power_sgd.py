"""PowerSGD where eager DDP has nothing to compare with: it crashes, or makes products in another
order. The catalogue of scenarios has its other trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from fusion_passes.reducer.reducer import reducer_of
from testing.equality import tensor_difference
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.features.comm_hooks import power_sgd_state
from testing.scenarios.features.unused import branching
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run, Tensors

RUN = Callable[..., list[Any]]


def _trained(train: Callable[[Run], None]) -> list[Tensors]:
    """Gradients after each backward under the flag, in a job for each rank."""
    run = Run("fused", torch.float32, torch.device("cpu"))
    with torch._inductor.config.patch(ddp_fusion="concat"):
        train(run)
    return run.backwards


def _register(ddp: Any) -> None:
    ddp.register_comm_hook(power_sgd_state(), powerSGD_hook.powerSGD_hook)


def in_several_buckets() -> list[Tensors]:
    """A few backwards, in buckets of a few gradients."""

    def train(run: Run) -> None:
        ddp = run.ddp(run.mlp(), bucket_cap_mb=SMALL_MB)
        _register(ddp)
        backwards(run, ddp, run.compile(ddp), 6)
        assert len(reducer_of(ddp).hooked_buckets) > 1

    return _trained(train)


def with_unused() -> list[Tensors]:
    """Branches that some ranks do not take."""
    takes = "a/bc abc/c bc/a a/bc abc/c bc/a"
    return _trained(lambda run: branching(run, takes, prepare=_register))


def _assert_alike(first: list[Tensors], second: list[Tensors]) -> None:
    assert first
    for ours, others in zip(first, second, strict=True):
        for name, value in ours.items():
            assert value is not None
            assert tensor_difference(value, others[name], 0.0) is None


def test_several_buckets(run_on_ranks: RUN) -> None:
    """Its callbacks launch collectives, which come in one order on all ranks: with eager DDP over
    Gloo they do not, and the processes crash."""
    _assert_alike(*run_on_ranks(2, in_several_buckets))


@pytest.mark.nightly  # A user's hook is tested with them in each check.
def test_unused_parameters(run_on_ranks: RUN) -> None:
    """Its products depend on the order of a bucket's gradients, which is not eager DDP's here. It
    makes NaN of a gradient that is zero on all ranks, and of that parameter's later ones."""
    first, second = run_on_ranks(2, with_unused)
    _assert_alike(first, second)
    assert all(value is not None and value.isfinite().all() for value in first[-1].values())
