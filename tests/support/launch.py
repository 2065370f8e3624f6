"""Programs of the checkout, run as a user runs them: in processes of their own, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
TIMEOUT_S: Final = 270.0


def environment(**variables: str) -> dict[str, str]:
    """This process's, for ranks with one thread each and no GPU."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def launch(*command: str, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module; several ranks under torchrun, which shows the first."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"]
    launcher = [*torchrun, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    process = subprocess.Popen(
        [sys.executable, *launcher, *command],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()  # Not killed: it ends its ranks.
        process.wait(timeout=30)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
