"""Where ranks run: cores, GPUs, network, and how many processes memory holds."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from bench_steps.network import DEVICE, ShapedNetwork
from bench_steps.processes import Place, cores_of

MULTI_RANK_NCCL = (2, 30)
"""NCCL lets several ranks use one GPU from this version on."""

PROCESS_BYTES = 300 * 2**20
"""What a rank takes beside its model: torch, the compiler, and its communication."""

MODEL_COPIES = 5
"""Parameters, gradients, buckets, and what a step keeps between forward and backward."""

MEMORY_SHARE = 0.8


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that runs: ``torch.cuda.nccl.version`` says with which torch was built, and a
    newer one can be installed beside it. Empty in a build without CUDA."""
    if torch.version.cuda is None:
        return ()
    # Torch has loaded it: its name stands for that one. Else it is a part of torch's own library.
    return version_of_nccl("libnccl.so.2") or tuple(torch.cuda.nccl.version())


def version_of_nccl(library: str) -> tuple[int, ...]:
    """Of a library by its name or file; empty where it is none that can be loaded."""
    found = ctypes.c_int()
    try:
        answer = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return ()
    # NCCL's own form since 2.9: 10000 major + 100 minor + patch.
    return () if answer else (found.value // 10000, found.value // 100 % 100, found.value % 100)


def place_of(
    model: str,
    size: str,
    ranks: int,
    *,
    network: ShapedNetwork | None,
    directory: Path,
    timeout_s: float,
    forwards: int = 1,
    shares_kernels: bool = False,
) -> Place:
    """Where the ranks of a model run.

    Raises:
        ValueError: there are more ranks than GPUs, and NCCL does not allow it.
    """
    variables = _gpu_variables(ranks)
    prefixes: tuple[tuple[str, ...], ...] = ((),) * ranks
    host = "127.0.0.1"
    if network is not None:
        host = network.topology.address(0)
        prefixes = tuple(network.topology.prefix(rank) for rank in range(ranks))
        variables |= {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE}
        # Else NCCL would pass by the network, from GPU to GPU.
        variables |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    cores = cores_of(ranks, sorted(os.sched_getaffinity(0)))
    return Place(
        model,
        size,
        cores,
        host,
        prefixes,
        variables,
        directory,
        timeout_s,
        forwards=forwards,
        shares_kernels=shares_kernels,
    )


def _gpu_variables(ranks: int) -> dict[str, str]:
    if not torch.cuda.is_available() or ranks <= torch.cuda.device_count():
        return {}
    version = nccl_version()
    if version < MULTI_RANK_NCCL:
        raise ValueError(
            f"--ranks {ranks} is more than the {torch.cuda.device_count()} GPUs here, which needs "
            f"NCCL {'.'.join(map(str, MULTI_RANK_NCCL))} or newer, but this is "
            f"{'.'.join(map(str, version))}. Give fewer ranks, or install a newer torch."
        )
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def together_of(ranks: int, model_bytes: int) -> int:
    """How many rows may have their processes alive at a time, for the memory there is.

    Args:
        ranks: of a row.
        model_bytes: of the parameters.
    """
    device_bytes = MODEL_COPIES * model_bytes
    row_bytes = ranks * (PROCESS_BYTES + device_bytes)
    # Compute alone and network alone are always there.
    return max(1, int(MEMORY_SHARE * available_bytes() / row_bytes) - 2)


def available_bytes() -> int:
    """Memory of the machine that processes could still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
