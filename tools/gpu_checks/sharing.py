"""One GPU for the kernels of several processes at a time: NVIDIA's Multi-Process Service. Without
it they have the GPU in turns of milliseconds, which each all-reduce between them waits for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable: by which processes find the service; those without it do not use it."""

COMMAND: Final = "nvidia-cuda-mps-control"
PATHS: Final = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/usr/bin")
ANSWER_S: Final = 10.0


def start(directory: Path) -> bool:
    """Start a service of our own; whether there is one. No setting of the GPU changes."""
    directory.mkdir(parents=True, exist_ok=True)
    return _control(directory, ["-d"])


def end(directory: Path) -> None:
    """Have it end."""
    _control(directory, [], "quit\n")


def _control(directory: Path, arguments: list[str], words: str = "") -> bool:
    command = shutil.which(COMMAND, path=os.pathsep.join([os.environ.get("PATH", ""), *PATHS]))
    if command is None:
        return False
    variables = os.environ | {DIRECTORY: str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    # Of the service, which holds what it inherits, nobody reads.
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [command, *arguments],
            input=words.encode(),
            stdout=nowhere,
            stderr=nowhere,
            env=variables,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
