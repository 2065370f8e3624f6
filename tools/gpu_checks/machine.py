"""Says as JSON what the checks run on: ``python -m gpu_checks.machine cuda``.

A process of its own, so that the tool itself takes no memory of the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Final

from command_line import ROOT

OLDEST: Final = (2, 11)
"""The oldest torch that is supported."""


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

    version = str(torch.__version__)
    why = _why_no_gpu(asked, version)
    device = "" if why else asked
    on_gpu = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return Machine(
        device,
        why,
        name=properties.name if properties else f"the CPU ({platform.machine()})",
        count=torch.cuda.device_count() if on_gpu else 0,
        memory_gib=round(properties.total_memory / 2**30, 1) if properties else 0.0,
        torch=version,
        python=platform.python_version(),
        nccl=".".join(map(str, nccl_version())),
        triton=_triton(),
        code=_code(),
    )


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that runs: ``torch.cuda.nccl.version`` says with which torch was built, and
    another one can be installed beside it. Empty in a build without CUDA."""
    import torch

    if torch.version.cuda is None:
        return ()
    found = ctypes.c_int()
    try:
        # Torch has loaded it: its name stands for that one. Else it is a part of torch's library.
        answer = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        answer = -1
    if answer:
        return tuple(torch.cuda.nccl.version())
    # NCCL's own form since 2.9: 10000 major + 100 minor + patch.
    return found.value // 10000, found.value // 100 % 100, found.value % 100


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
    found = importlib.util.find_spec("triton")
    return importlib.metadata.version("triton") if found else ""


def _code() -> str:
    """A hash of what a result can depend on: the package and the checks."""
    folders = ("fusion_passes", "testing", "tools/benches", "tools/gpu_checks", "tools/workloads")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
