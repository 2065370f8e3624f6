"""Says as JSON what the checks run on: ``python -m gpu_checks.machine cuda``.

A process of its own, so that the tool itself takes no memory of the GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
OLDEST: Final = (2, 11)
"""The oldest torch that is supported."""

PACKAGES: Final = ("/root", "/usr/local", "/opt", "/usr/lib")
"""Where other environments than this one lie."""

FIND_S: Final = 8.0


@dataclass(frozen=True)
class Machine:
    """What the checks run on.

    Attributes:
        device: ``"cuda"``, ``"cpu"``, or empty where a GPU was asked for and there is none.
        why_none: why there is none.
        name: of the GPU, or of the machine's processor.
        count: of GPUs.
        memory_gib: of the GPU.
        torch: version.
        python: version.
        nccl: version of the one that runs; empty in a build without it.
        torchs_nccl: version of torch's own.
        shares_gpu: whether this NCCL says that it takes several ranks on one GPU.
        newer_nccl: version of one that takes them, where this one does not.
        newer_file: the file of that one.
        triton: version; empty where it is not installed.
        code: hash of the package and of the checks.
    """

    device: str
    why_none: str = ""
    name: str = ""
    count: int = 0
    memory_gib: float = 0.0
    torch: str = ""
    python: str = ""
    nccl: str = ""
    torchs_nccl: str = ""
    shares_gpu: bool = False
    newer_nccl: str = ""
    newer_file: str = ""
    triton: str = ""
    code: str = ""

    @property
    def key(self) -> str:
        """What the results of one table have in common."""
        return f"{self.name}, torch {self.torch}, code {self.code}"


def main(arguments: list[str]) -> int:
    """Print what the machine is, as JSON."""
    print(json.dumps(asdict(machine(arguments[0]))))
    return 0


def machine(asked: str) -> Machine:
    """What the checks run on.

    Args:
        asked: ``"cuda"`` or ``"cpu"``.
    """
    import torch

    from bench_steps.places import MULTI_RANK_NCCL, nccl_version

    version = str(torch.__version__)
    why = _why_no_gpu(asked, version)
    device = "" if why else asked
    on_gpu = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    nccl = nccl_version()
    newer, file = nccl, ""
    if on_gpu and torch.cuda.device_count() == 1 and nccl < MULTI_RANK_NCCL:
        newer, file = max(other_nccls(), default=(nccl, ""))
    if newer < MULTI_RANK_NCCL:
        file = ""
    return Machine(
        device,
        why,
        name=properties.name if properties else f"the CPU ({platform.machine()})",
        count=torch.cuda.device_count() if on_gpu else 0,
        memory_gib=round(properties.total_memory / 2**30, 1) if properties else 0.0,
        torch=version,
        python=platform.python_version(),
        nccl=".".join(map(str, nccl)),
        torchs_nccl=".".join(map(str, torch.cuda.nccl.version() if on_gpu else ())),
        shares_gpu=nccl >= MULTI_RANK_NCCL,
        newer_nccl=".".join(map(str, newer)) if file else "",
        newer_file=file,
        triton=_triton(),
        code=_code(),
    )


def other_nccls() -> list[tuple[tuple[int, ...], str]]:
    """Find what lies where packages are installed, within :data:`FIND_S`.

    Returns:
        Version and file of each that can be loaded.
    """
    from bench_steps import places

    roots = dict.fromkeys(filter(os.path.isdir, (*PACKAGES, *sys.path)))
    command = ["find", *roots, "-maxdepth", "9", "-name", "libnccl.so.2"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=FIND_S, check=False).stdout
    except subprocess.TimeoutExpired as late:
        listed = late.stdout or b""
    files = {os.path.realpath(line) for line in listed.decode().splitlines()}
    return [(version, file) for file in files if (version := places.version_of_nccl(file))]


def _why_no_gpu(asked: str, version: str) -> str:
    import torch

    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"torch {version} is older than {'.'.join(map(str, OLDEST))}"
    if asked == "cpu":
        return ""
    if torch.version.cuda is None:
        return f"torch {version} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {version} (CUDA {torch.version.cuda}) finds none"
    if not _triton():
        return "Triton is not installed, without which torch.compile has no kernels for it"
    return ""


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return ""
    return str(importlib.import_module("triton").__version__)


def _code() -> str:
    """A hash of what a result can depend on: the package and the checks."""
    tools = ("gpu_checks", "workloads", "bench_steps")
    folders = ("fusion_passes", "testing", *(f"tools/{name}" for name in tools))
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
