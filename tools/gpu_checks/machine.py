"""Says as JSON what the checks run on: ``python -m gpu_checks.machine cuda``.

A process of its own, so that the tool itself takes no memory of the GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Final

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
        nccl: version that torch was built with; empty in a build without it.
        triton: version; empty where it is not installed.
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

    def __str__(self) -> str:
        memory = f", {self.memory_gib:g} GiB" if self.memory_gib else ""
        versions = {"torch": self.torch, "NCCL": self.nccl, "Triton": self.triton}
        named = "".join(f", {name} {text}" for name, text in versions.items() if text)
        return f"{self.name}{memory}{named}, Python {self.python}"


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
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "",
        triton=_triton(),
    )


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
