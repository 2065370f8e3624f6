"""Trains a scenario on this rank with eager DDP, under the flag and, where the entry says so, with
gradients averaged by hand, and compares."""

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
from fusion_passes.reporting.backwards import backwards
from testing.scenarios.entries import Scenario
from testing.scenarios.outcomes import Failure, RankReport
from testing.scenarios.run import DTYPES, Run, Tensors, Way

MAX_DIFFERENCES = 40


def target_of(scenario: Scenario) -> Callable[[Run], None]:
    """The function that trains."""
    module, _, function = scenario.target.partition(":")
    target: Callable[..., None] = getattr(importlib.import_module(module), function)
    return functools.partial(target, **dict(scenario.arguments))


def flag_of(scenario: Scenario, mode: str, graph: str = "auto") -> FusionConfig:
    """What ``ddp_fusion`` is set to.

    Args:
        scenario: has options of its own.
        mode: of ``FusionConfig``.
        graph: ``FusionConfig.backward_graph``.
    """
    options: dict[str, Any] = {"mode": mode, "backward_graph": graph, **dict(scenario.options)}
    return FusionConfig(**options)


def train_both(scenario: Scenario, dtype: str, flag: Any, device: torch.device) -> RankReport:
    """Train all ways on this rank, and compare.

    Args:
        scenario: what is trained.
        dtype: name of its dtype.
        flag: value of ``ddp_fusion``.
        device: of this rank.
    """
    target, kind, rank = target_of(scenario), DTYPES[dtype], dist.get_rank()
    eager_failure = None
    eager = Run("eager", kind, device)
    if not scenario.must_fail:
        eager_failure = _attempt(target, eager)
    fused, unwaited = Run("fused", kind, device), _get_work_registry_size()
    counters.clear()
    backwards.reset()
    with (
        torch._inductor.config.patch(ddp_fusion=flag),
        torch._functorch.config.patch(donated_buffer=not scenario.keeps_graph),
        noted_warnings() as warned,
    ):
        failure = _attempt(target, fused)
    if failure or eager_failure:
        return RankReport(rank, eager_failure, failure, warned=tuple(warned))
    found = differences(fused, eager, scenario.tolerance_eps)
    if scenario.by_hand:
        found += _differences_by_hand(target, fused)
    return RankReport(
        rank,
        differences=tuple(found),
        reduced_in=tuple(sorted({item.reduced_in for item in backwards.reports()})),
        launches=_launches(fused),
        traced=counters["compiled_autograd"]["captures"],
        unwaited=_get_work_registry_size() - unwaited,
        warned=tuple(warned),
    )


def _launches(run: Run) -> tuple[int, ...]:
    """Collectives in the backwards that average; of the first one where there is no other."""
    averaging = [item for item in run.launches if item.synced]
    later = {item.number for item in averaging if not item.is_first}
    return tuple(sorted(later or {item.number for item in averaging}))


def _attempt(target: Callable[[Run], None], run: Run) -> Failure | None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        target(run)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the result.
        _say(run.way, traceback.format_exc())
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Failure(kinds, str(error), len(run.backwards), traceback.format_exc())
    finally:
        gc.collect()  # Modules of one way do not reduce gradients of the other.
    return None


def _differences_by_hand(target: Callable[[Run], None], fused: Run) -> list[str]:
    """In what the run under the flag differs from one without DDP: in every bit, for on two ranks
    an average has one order only."""
    by_hand = Run("by hand", fused.dtype, fused.device)
    failure = _attempt(target, by_hand)
    found = [failure.text] if failure else differences(fused, by_hand, 0.0)
    return [f"averaged by hand, {difference}" for difference in found]


def _say(way: Way, text: str) -> None:
    print(f"rank {dist.get_rank()}, {way}:\n{text}", flush=True)


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """The texts of the package's warnings, once it is left; all others are printed then."""
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
    """In what the run under the flag differs from eager DDP's, in words; the first of them.

    Args:
        fused: the run under the flag.
        eager: what it must equal.
        tolerance_eps: as in :func:`tensor_difference`.
    """
    if len(fused.backwards) != len(eager.backwards):
        return [f"{len(fused.backwards)} backwards instead of {len(eager.backwards)}"]
    stages = [
        (f"backward {index}, gradient", ours, theirs)
        for index, (ours, theirs) in enumerate(zip(fused.backwards, eager.backwards, strict=True))
    ]
    stages.append(("in the end,", fused.end, eager.end))
    found = [
        difference
        for stage, ours, theirs in stages
        for difference in _of_stage(stage, ours, theirs, tolerance_eps)
    ]
    for index, (ours, theirs) in enumerate(zip(fused.launches, eager.launches, strict=True)):
        # More than none: eager DDP rebuilds its buckets once, whatever the backward.
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
    """In what two tensors differ: dtype, shape, strides, or values. ``None`` if in nothing. NaN
    equals NaN: a step with infinite gradients makes some.

    Args:
        actual: a tensor, or none.
        expected: what it must equal.
        tolerance_eps: as of a :class:`testing.scenarios.entries.Scenario`.
    """
    ours, theirs = map(_kind_of, (actual, expected))
    if ours != theirs:
        return f"{ours} instead of {theirs}"
    if actual is None or expected is None:
        return None
    if not actual.is_floating_point():
        return None if torch.equal(actual, expected) else "values differ"
    nans = expected.isnan()
    if not torch.equal(actual.isnan(), nans):
        return f"{int(actual.isnan().sum())} elements are NaN instead of {int(nans.sum())}"
    actual, expected = actual.masked_fill(nans, 0).double(), expected.masked_fill(nans, 0).double()
    if torch.equal(actual, expected):
        return None
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    error /= torch.finfo(ours[0]).eps
    if error <= tolerance_eps:
        return None
    return f"differs by {error:.3g} eps of its largest element (allowed: {tolerance_eps:g})"


def _kind_of(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.stride())
