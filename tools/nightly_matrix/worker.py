"""One rank of a cell, started by ``torchrun``: trains with eager DDP and under the flag, compares,
and tells.

    torchrun ... --module nightly_matrix.worker CATALOG CELL GRAPH DIRECTORY SECONDS
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist

import fusion_passes
from fusion_passes import FusionConfig
from nightly_matrix.cells import Cell, Scenario, cells_of
from nightly_matrix.comparing import differences
from nightly_matrix.ranks import Failure, RankReport, report_path
from nightly_matrix.run import DTYPES, Run, Way

STAY_S = 20.0
"""How long a rank that is done stays for the others beyond the group's timeout: whoever waits for
it in a collective is to find out by itself, as in a program that catches its errors."""


def main(arguments: list[str]) -> int:
    """Run this rank's part of a cell; 0 whatever has become of it, if it is written down."""
    catalog, name, graph, directory, deadline = arguments
    # Says where it hangs; and a rank whose launcher is gone does not stay behind.
    left_s = max(0.1, float(deadline) - time.monotonic())
    faulthandler.dump_traceback_later(left_s, exit=True)
    scenarios = importlib.import_module(catalog).SCENARIOS
    (cell,) = [cell for cell in cells_of(scenarios) if cell.name == name]
    torch.set_num_threads(1)
    device = _join_group(cell)
    flag = FusionConfig(mode=cell.mode, backward_graph=graph)  # type: ignore[arg-type]
    report = train_both(cell.scenario, cell.dtype, flag, device)
    report.write(Path(directory))
    _stay_for_others(cell, Path(directory))
    sys.stdout.flush()
    sys.stderr.flush()
    # What would follow waits for process groups that others may have left.
    os._exit(0)


def _join_group(cell: Cell) -> torch.device:
    """Join the ranks, over NCCL where each has a GPU; return this rank's device."""
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= cell.scenario.ranks
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=cell.scenario.group_timeout_s)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    return device


def target_of(scenario: Scenario) -> Callable[[Run], None]:
    """The function that trains."""
    module, _, function = scenario.target.partition(":")
    target: Callable[[Run], None] = getattr(importlib.import_module(module), function)
    return target


def train_both(scenario: Scenario, dtype: str, flag: Any, device: torch.device) -> RankReport:
    """Train both ways on this rank, and compare.

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
    fused = Run("fused", kind, device)
    before = len(fusion_passes.reports())
    with torch._inductor.config.patch(ddp_fusion=flag), _noted_warnings() as warned:
        failure = _attempt(target, fused)
    if failure or eager_failure:
        return RankReport(rank, eager_failure, failure, warned=tuple(warned))
    reports = fusion_passes.reports()[before:]
    buckets = [bucket for report in reports for bucket in report.buckets]
    return RankReport(
        rank,
        differences=tuple(differences(fused, eager, scenario.tolerance_eps)),
        gradients=fused.gradients,
        covered=len({(b.group, b.module, name) for b in buckets for name in b.parameters}),
        before=sum(report.collectives_before for report in reports),
        after=sum(report.collectives_after for report in reports),
        warned=tuple(warned),
    )


def _attempt(target: Callable[[Run], None], run: Run) -> Failure | None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        target(run)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the cell's result.
        _say(run.way, traceback.format_exc())
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Failure(kinds, str(error), len(run.backwards), traceback.format_exc())
    finally:
        gc.collect()  # Modules of one way do not reduce gradients of the other.
    return None


def _say(way: Way, text: str) -> None:
    print(f"rank {dist.get_rank()}, {way}:\n{text}", flush=True)


@contextlib.contextmanager
def _noted_warnings() -> Iterator[list[str]]:
    """The texts of the package's warnings, once it is left; all others are printed then."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fusion_passes.FusionWarning)
        yield texts
    for item in caught:
        if issubclass(item.category, fusion_passes.FusionWarning):
            texts.append(str(item.message))
        warnings.showwarning(item.message, item.category, item.filename, item.lineno)


def _stay_for_others(cell: Cell, directory: Path) -> None:
    paths = [report_path(directory, rank) for rank in range(cell.scenario.ranks)]
    deadline = time.monotonic() + cell.scenario.group_timeout_s + STAY_S
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
