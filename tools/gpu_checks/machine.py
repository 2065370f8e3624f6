"""Describes the machine of the checks, from a separate process, so that the tool takes no GPU
memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import platform
from dataclasses import dataclass
from typing import Final

OLDEST: Final = (2, 11)
"""The oldest supported torch."""

ANSWER_S: Final = 120.0
"""Time limit until torch describes the machine, in seconds."""


@dataclass(frozen=True)
class Machine:
    """The machine that the checks run on.

    Attributes:
        device: ``"cuda"``, ``"cpu"``, or empty if a GPU was requested and there is none.
        words: the GPU or the processor, and versions, for people; or why there is no GPU.
        count: number of GPUs.
        memory_gib: memory of the GPU.
    """

    device: str
    words: str
    count: int = 0
    memory_gib: float = 0.0


def ask_machine(device: str) -> Machine:
    """Describe the machine; ``device`` is ``"cuda"`` or ``"cpu"``.

    Raises:
        RuntimeError: torch cannot be imported, or the GPU does not answer.
    """
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply_async(_machine, (device,)).get(ANSWER_S)
    except (ImportError, RuntimeError, multiprocessing.TimeoutError) as error:
        raise RuntimeError(f"torch or the GPU does not answer: {error!r}") from error


def _machine(asked: str) -> Machine:
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
