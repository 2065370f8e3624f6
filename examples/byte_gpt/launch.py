"""Starts the example's processes with torchrun, and ends them all together.

``torchrun`` itself answers Ctrl-C with a page of traceback; this calls the same code and turns the
signal into an exit code. Torch is imported late, so that Ctrl-C is quiet from the start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_PROCESSES: Final = 2
"""Processes on a machine without CUDA: the smallest number with gradients to reduce."""


def started_by_torchrun() -> bool:
    """Whether this process is one of the ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_at_once_on_interrupt() -> None:
    """Let SIGINT and SIGTERM end this process in the kernel.

    Python's own handler for SIGINT runs only between two bytecodes: a rank that waits in a
    collective for a peer that is gone would never reach it, and would print a traceback otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def launch(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` once per rank on this machine and wait for all ranks.

    Returns:
        0 where every rank ended well, the exit code of the first that failed, or 128 + the
        signal's number where one ended the run (130 for Ctrl-C).
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun logs each signal that it passes on and each rank that fails: both are reported below.
    logging.disable(logging.ERROR)
    processes = _process_count()
    _set_environment(processes)
    options = run.parse_args(["--standalone", f"--nproc-per-node={processes}", script, *arguments])
    try:
        run.run(options)
    except SignalException as interrupt:
        name = signal.Signals(interrupt.sigval).name
        print(f"\nStopped by {name}: all {processes} processes have ended.", file=sys.stderr)
        return 128 + int(interrupt.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        print(f"Rank {rank} failed with exit code {failure.exitcode}.", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _process_count() -> int:
    """One process per GPU, or ``CPU_PROCESSES`` without CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else CPU_PROCESSES


def _set_environment(processes: int) -> None:
    """Defaults for a run on one machine; the user's settings are kept."""
    # torchrun's own default is one thread per process, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // processes)))
    # Gloo looks up the host's name to choose an interface, and many containers can't.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
