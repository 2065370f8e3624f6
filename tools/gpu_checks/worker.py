"""One process of a part: trains or measures, and writes what it finds as it finds it.

python -m gpu_checks.worker PART DIRECTORY RANK
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_checks.parts import Check, Part
from gpu_checks.results import Row
from gpu_checks.sites import ROWS, SITE, Site

if TYPE_CHECKING:
    import torch

PORT = "port"
GROUP_TIMEOUT_S = 40.0
PORT_S = 90.0
"""At most, until rank 0 has imported torch on busy cores."""


def main(arguments: list[str]) -> int:
    """Run this process's share of a part; 1 if it cannot go on to the end."""
    name, directory, rank = arguments[0], Path(arguments[1]), int(arguments[2])
    site = Site.read(directory / SITE)
    # Says where it hangs; and a process whose tool is gone does not stay behind.
    faulthandler.dump_traceback_later(max(0.1, site.deadline - time.monotonic()), exit=True)
    part = part_of(site.catalog, name)
    status = 0
    try:
        store = _prepare(part, site, directory, rank)
        if part.checks:
            _train(part, site, directory, store)
        else:
            _measure(part, site, directory, rank)
    except Exception:  # noqa: BLE001  Whatever it is, it is the part's result.
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What would follow waits for process groups that others may have left.
    os._exit(status)


def part_of(catalog: str, name: str) -> Part:
    """A part by its name; of a catalog's ``PARTS``, or its ``PROBE``."""
    module = importlib.import_module(catalog)
    parts: list[Part] = [*module.PARTS, module.PROBE]
    (part,) = [part for part in parts if part.name == name]
    return part


def _prepare(part: Part, site: Site, directory: Path, rank: int) -> Any:
    """Set what makes two ways comparable, choose the GPU, and join the ranks; their store."""
    if not part.has_group:
        return None
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Else convolutions round to 10 bits, and no two algorithms agree.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    if site.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    store = _store(part.ranks, directory, rank, timeout)
    dist.init_process_group(
        site.backend, store=store, rank=rank, world_size=part.ranks, timeout=timeout
    )
    return store


def _store(ranks: int, directory: Path, rank: int, timeout: datetime.timedelta) -> Any:
    """The store of the ranks; the first tells the others its port by a file."""
    import torch.distributed as dist

    connect = functools.partial(dist.TCPStore, "127.0.0.1", world_size=ranks, timeout=timeout)
    path = directory / PORT
    if rank == 0:
        store = connect(port=0, is_master=True, wait_for_workers=False)
        begun = path.with_suffix(".part")
        begun.write_text(str(store.port))
        begun.replace(path)
        return store
    deadline = time.monotonic() + PORT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return connect(port=int(path.read_text()), is_master=False)


# --- Trainings -----------------------------------------------------------------------------------


def _train(part: Part, site: Site, directory: Path, store: Any) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if site.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for number, check in enumerate(part.checks_on(site.device)):
        print(f"== {number}: {check.title}", flush=True)
        failed = not _run_check(check, device, directory / str(number))
        store.set(f"gpu-check/{number}/{dist.get_rank()}", str(failed))
        fates = {store.get(f"gpu-check/{number}/{rank}").decode() for rank in range(part.ranks)}
        if len(fates) > 1:
            # One may have left a collective that the other was in: the next would compare nothing.
            raise RuntimeError(f"{check.title}: some ranks failed, and others did not")
    # The store ends with the first rank.
    store.set(f"gpu-check/end/{dist.get_rank()}", "")
    for rank in range(part.ranks if dist.get_rank() == 0 else 0):
        store.get(f"gpu-check/end/{rank}")


def _run_check(check: Check, device: torch.device, directory: Path) -> bool:
    """Train both ways and write the report; whether both came to their end."""
    from fusion_passes import FusionConfig
    from fusion_passes.state import process_state
    from testing.scenarios.both_ways import train_both

    # Each training begins as in a new process.
    gc.collect()
    process_state.reset()
    report = train_both(check.scenario, check.dtype, FusionConfig(**check.flag), device)
    directory.mkdir(exist_ok=True)
    report.write(directory)
    return report.eager is None and report.fused is None


# --- Measurements --------------------------------------------------------------------------------


def _measure(part: Part, site: Site, directory: Path, rank: int) -> None:
    module, _, function = part.measure.partition(":")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((directory / ROWS).open("a")) if rank == 0 else None

        def note(row: Row) -> None:
            if file is not None:
                print(json.dumps(asdict(row)), file=file, flush=True)

        getattr(importlib.import_module(module), function)(site, note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
