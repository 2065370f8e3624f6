"""One rank of a cell, started by ``torchrun``: trains with eager DDP and under the flag, compares,
and tells.

    torchrun ... --module nightly_matrix.worker CATALOG CELL GRAPH DIRECTORY SECONDS
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nightly_matrix.cells import Cell, cells_of
from testing.scenarios.both_ways import flag_of, train_both
from testing.scenarios.ranks import report_path

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
    flag = flag_of(cell.scenario, cell.mode, graph)
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


def _stay_for_others(cell: Cell, directory: Path) -> None:
    paths = [report_path(directory, rank) for rank in range(cell.scenario.ranks)]
    deadline = time.monotonic() + cell.scenario.group_timeout_s + STAY_S
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
