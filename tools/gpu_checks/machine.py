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
        words: the GPU or the processor, and versions, for people; or why there is no GPU.
        count: of GPUs.
        memory_gib: of the GPU.
    """

    device: str
    words: str
    count: int = 0
    memory_gib: float = 0.0


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
    if why := _why_no_gpu(asked, version):
        return Machine("", why)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""
    versions = {"torch": version, "NCCL": nccl, "Triton": _triton()}
    named = [f"{name} {text}" for name, text in versions.items() if text]
    named.append(f"Python {platform.python_version()}")
    if asked == "cpu":
        return Machine("cpu", ", ".join([f"the CPU ({platform.machine()})", *named]))
    properties = torch.cuda.get_device_properties(0)
    memory_gib = round(properties.total_memory / 2**30, 1)
    words = ", ".join([properties.name, f"{memory_gib:g} GiB", *named])
    return Machine("cuda", words, torch.cuda.device_count(), memory_gib)


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
