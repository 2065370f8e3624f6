"""The checkout: its files, and its programs, run in their own processes on the CPU, as a user runs
them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
TIMEOUT_S: Final = 240.0


@functools.cache
def tracked() -> frozenset[str]:
    """Files that git tracks or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    return frozenset(name for name in names if (ROOT / name).is_file())


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, for ranks with one thread each and no GPU."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def launch(
    *command: str, ranks: int = 1, cwd: str | Path = ".", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, ``-m`` and a module, or ``-c`` and code, and require that it ends without an
    error; several ranks run under torchrun, which shows the first rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-ranks-filter=0"]
    launcher = [*torchrun, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    process = subprocess.Popen(
        [sys.executable, *launcher, *command],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()  # Terminated instead of killed, so that it ends its ranks.
        process.wait(timeout=30)
    assert process.returncode == 0, output + errors
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
