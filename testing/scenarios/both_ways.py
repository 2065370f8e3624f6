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
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.utils import counters

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.reporting.backwards import backwards
from testing.scenarios.comparing import differences
from testing.scenarios.entries import Scenario
from testing.scenarios.ranks import Failure, RankReport
from testing.scenarios.run import DTYPES, Run, Way

NOT_DDPS = ("belongs to no DistributedDataParallel module", "a collective of another kind")
"""Why a collective of the user's, or of tensor parallelism, is left as it is."""


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
    reports = fused.reports()
    rejections = {item.reason for report in reports for item in report.rejections}
    return RankReport(
        rank,
        differences=tuple(found),
        gradients=fused.gradients,
        reduced_in=tuple(sorted({item.reduced_in for item in backwards.reports()})),
        rejected=tuple(sorted(r for r in rejections if not any(words in r for words in NOT_DDPS))),
        before=sum(report.collectives_before for report in reports),
        after=sum(report.collectives_after for report in reports),
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
