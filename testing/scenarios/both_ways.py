"""Trains a scenario on this rank with eager DDP and under the flag, and compares."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.utils import counters

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.reporting.modules import backward_counts
from testing.scenarios.entries import Scenario
from testing.scenarios.outcomes import Failure, RankReport
from testing.scenarios.run import DTYPES, Run, Tensors

MAX_DIFFERENCES = 40


def target_of(scenario: Scenario) -> Callable[[Run], None]:
    """The function that trains a scenario."""
    module, _, function = scenario.target.partition(":")
    target: Callable[..., None] = getattr(importlib.import_module(module), function)
    return functools.partial(target, **dict(scenario.arguments))


def flag_of(scenario: Scenario, mode: str, graph: str = "auto") -> FusionConfig:
    """The value of ``ddp_fusion`` for a scenario, with the scenario's own options."""
    options: dict[str, Any] = {"mode": mode, "backward_graph": graph, **dict(scenario.options)}
    return FusionConfig(**options)


def train_both(scenario: Scenario, dtype: str, flag: Any, device: torch.device) -> RankReport:
    """Train with eager DDP and under the flag on this rank, and compare. ``flag`` is the value of
    ``ddp_fusion`` for the second training."""
    target, kind, rank = target_of(scenario), DTYPES[dtype], dist.get_rank()
    eager = Run(is_fused=False, dtype=kind, device=device)
    eager_failure = _attempt(target, eager)
    fused = Run(is_fused=True, dtype=kind, device=device)
    unwaited = _get_work_registry_size()
    counters.clear()
    with (
        torch._inductor.config.patch(ddp_fusion=flag),
        torch._functorch.config.patch(donated_buffer=not scenario.keeps_graph),
        noted_warnings() as warned,
    ):
        failure = _attempt(target, fused)
    if failure or eager_failure:
        return RankReport(rank, eager_failure, failure, warned=tuple(warned))
    found = differences(fused, eager, scenario.tolerance_eps)
    return RankReport(
        rank,
        differences=tuple(found),
        reduced_in=tuple(sorted({item.reduced_in for item in backward_counts.reports()})),
        launches=_launches(fused),
        traced=counters["compiled_autograd"]["captures"],
        unwaited=_get_work_registry_size() - unwaited,
        warned=tuple(warned),
    )


def _launches(run: Run) -> tuple[int, ...]:
    """Collectives in the averaged backwards after the first one, at whose end buckets are rebuilt;
    in the first one if there is no other."""
    averaging = [item.number for item in run.launches if item.synced]
    return tuple(sorted({*(averaging[1:] or averaging)}))


def _attempt(target: Callable[[Run], None], run: Run) -> Failure | None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        target(run)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the result.
        way = "fused" if run.is_fused else "eager"
        print(f"rank {dist.get_rank()}, {way}:\n{traceback.format_exc()}", flush=True)
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        gc.collect()  # Otherwise modules of one training would reduce gradients of the other.
    return None


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """A list of the texts of the package's warnings. It is filled at the end of the block, when all
    warnings are shown."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fusion_passes.FusionWarning)
        yield texts
    for item in caught:
        if issubclass(item.category, fusion_passes.FusionWarning):
            texts.append(str(item.message))
        warnings.showwarning(item.message, item.category, item.filename, item.lineno)


# --- In what two runs differ ----------------------------------------------------------------------


def differences(fused: Run, eager: Run, tolerance_eps: float) -> list[str]:
    """The first differences between the run under the flag and eager DDP's, in words."""
    if len(fused.backwards) != len(eager.backwards):
        return [f"{len(fused.backwards)} backwards instead of {len(eager.backwards)}"]
    stages = [
        (
            f"backward {index}, gradient",
            {name: value for name, value in ours.items() if (index, name) not in fused.unknown},
            {name: value for name, value in theirs.items() if (index, name) not in fused.unknown},
        )
        for index, (ours, theirs) in enumerate(zip(fused.backwards, eager.backwards, strict=True))
    ]
    stages.append(("in the end,", fused.end, eager.end))
    found = [
        difference
        for stage, ours, theirs in stages
        for difference in _of_stage(stage, ours, theirs, tolerance_eps)
    ]
    for index, (ours, theirs) in enumerate(zip(fused.launches, eager.launches, strict=True)):
        # At least one: eager DDP rebuilds its buckets once, whatever the backward.
        if not ours.synced and ours.number > theirs.number + (index == 0 and theirs.number > 0):
            pair = f"{ours.number} collectives instead of {theirs.number}"
            found.append(f"backward {index}: {pair}, with no_sync")
    if fused.others != eager.others:
        found.append(f"{fused.others} instead of {eager.others}")
    return found[:MAX_DIFFERENCES]


def _of_stage(stage: str, ours: Tensors, theirs: Tensors, tolerance_eps: float) -> Iterator[str]:
    if ours.keys() != theirs.keys():
        yield f"{stage}s of {sorted(ours)} instead of {sorted(theirs)}"
        return
    for name, value in ours.items():
        expected = theirs[name]
        difference = tensor_difference(value, expected, tolerance_eps)
        if difference:
            yield f"{stage} {name}: {difference}"


def tensor_difference(
    actual: Tensor | None, expected: Tensor | None, tolerance_eps: float
) -> str | None:
    """Difference between two tensors: dtype, shape, strides, or values by more than a scenario's
    ``tolerance_eps``. ``None`` if there is none. NaN equals NaN, because a step with infinite
    gradients produces NaN."""
    if actual is None or expected is None:
        return None if actual is expected else f"{actual} instead of {expected}"
    allowed = 0.0
    if tolerance_eps and expected.is_floating_point():
        finite = expected[expected.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        allowed = tolerance_eps * torch.finfo(expected.dtype).eps * largest
    try:
        torch.testing.assert_close(
            actual, expected, rtol=0.0, atol=allowed, equal_nan=True, check_stride=True
        )
    except AssertionError as error:
        return str(error)
    return None
