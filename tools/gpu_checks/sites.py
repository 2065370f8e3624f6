"""The place where a part runs. Nothing here imports torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benches.processes import Place, cores_of
from benches.results import Row

Note = Callable[[Row], None]
"""Records a row of a part's table as soon as it is known; a later row with the same title replaces
it."""

MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable with which processes find NVIDIA's Multi-Process Service, which runs the
kernels of several processes at the same time. Without it, they use the GPU in turns of
milliseconds, which each all-reduce between them waits for."""

MPS_COMMAND: Final = "nvidia-cuda-mps-control"
MPS_PATHS: Final = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/usr/bin")
MPS_ANSWER_S: Final = 10.0


@dataclass(frozen=True)
class Site:
    """The place where a part runs.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``. On the CPU everything is tiny: it shows that the checks
            work.
        backend: backend of the process group.
        directory: directory for files of the part.
        cores: cores that it may use.
        gpus: number of GPUs.
        memory_gib: memory of the device; 0 on the CPU.
        mps: directory of the service that runs the kernels of two ranks on one GPU at the same
            time; empty without it.
        deadline: time of ``time.monotonic``, which all processes of a machine share.
    """

    device: str
    backend: str
    directory: str = ""
    cores: int = 1
    gpus: int = 0
    memory_gib: float = 0.0
    mps: str = ""
    deadline: float = 0.0

    @property
    def is_small(self) -> bool:
        return self.device == "cpu"

    def place(self, ranks: int, **options: Any) -> Place:
        """The place of ranks: two share a GPU if there is only one. ``options`` are further or
        other options of :class:`benches.processes.Place`."""
        given: dict[str, Any] = {
            "directory": Path(self.directory),
            "cores": cores_of(ranks, range(self.cores)),
            "backend": self.backend,
            "shares_kernels": True,
            "variables": {},
            "prefixes": ((),) * ranks,
            **options,
        }
        if self.is_small:
            given["variables"] |= {"CUDA_VISIBLE_DEVICES": ""}
        elif ranks > self.gpus:
            given["variables"] |= {MPS: self.mps} if self.mps else {}
            # If NCCL is told that each rank is on a machine of its own, it accepts them, and sends
            # through sockets.
            given["prefixes"] = tuple(
                (*prefix, "env", f"NCCL_HOSTID=rank-{rank}")
                for rank, prefix in enumerate(given["prefixes"])
            )
        return Place(**given)


def control_mps(directory: Path, *arguments: str, words: str = "") -> bool:
    """Start our own service (``-d``), or send it a command; whether that succeeded. No setting of
    the GPU changes."""
    directory.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *MPS_PATHS])
    variables = {**os.environ, MPS: str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    # Nobody reads the output of the service, which keeps inherited files open.
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [shutil.which(MPS_COMMAND, path=path) or MPS_COMMAND, *arguments],
            input=words.encode(),
            stdout=nowhere,
            stderr=nowhere,
            env=variables,
            timeout=MPS_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
