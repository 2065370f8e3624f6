"""Times the collective of a bucket: where it is scaled, and flat beside coalesced.

Starts a few processes on this machine, over Gloo and, where there are as many GPUs, over NCCL.
Prints a Markdown table of ratios to the plain sum of one flat buffer, which ran in the same round:
the machine's speed drifts, ratios do not.

    python tools/bench.py scaling                      # the table
    python tools/bench.py scaling --ranks 4 --mib 25   # of one size
    python tools/bench.py scaling --output DIR         # kept
"""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context
from tqdm import tqdm

from benches.results import Origin, keep, page, parser_of, table

PIECES = 48
"""Gradients of a bucket: what 25 MiB hold of a small transformer's."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIMEOUT = datetime.timedelta(seconds=120)


@dataclass
class Buffers:
    """A bucket, flat and in pieces; the pieces are tensors of their own."""

    flat: Tensor
    pieces: list[Tensor]
    world_size: int


def _sum(buffers: Buffers) -> None:
    dist.all_reduce(buffers.flat)


def _average(buffers: Buffers) -> None:
    dist.all_reduce(buffers.flat, op=dist.ReduceOp.AVG)


def _divide_and_sum(buffers: Buffers) -> None:
    buffers.flat.div_(buffers.world_size)
    dist.all_reduce(buffers.flat)


def _copy_and_sum(buffers: Buffers) -> None:
    flat = torch.cat([piece.view(-1) for piece in buffers.pieces])
    dist.all_reduce(flat)


def _coalesced(buffers: Buffers) -> None:
    _c10d_coalesced(buffers.pieces, "sum")


def _average_coalesced(buffers: Buffers) -> None:
    _c10d_coalesced(buffers.pieces, "avg")


def _c10d_coalesced(tensors: list[Tensor], reduce_op: str) -> None:
    assert dist.group.WORLD is not None, "only in a process of the bench"
    name = dist.group.WORLD.group_name
    for tensor in torch.ops._c10d_functional.all_reduce_coalesced_(tensors, reduce_op, name):
        torch.ops._c10d_functional.wait_tensor(tensor)


WAYS: dict[str, Callable[[Buffers], None]] = {
    "sum": _sum,
    "average": _average,
    "divide, sum": _divide_and_sum,
    "copy, sum": _copy_and_sum,
    "coalesced sum": _coalesced,
    "coalesced average": _average_coalesced,
}

Key = tuple[str, str, int, str]
"""Backend, dtype, MiB, way."""


def main(arguments: Sequence[str]) -> int:
    """Run the bench."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 25], help="sizes (1 25)")
    parser.add_argument("--rounds", type=int, default=15, help="times each way is run (15)")
    options = parser.parse_args(arguments)
    for name in ("ranks", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(options, name)}")
    if min(options.mib) < 1:
        parser.error(f"--mib must be at least 1, but is {min(options.mib)}")
    backends = ["gloo"]
    if torch.cuda.device_count() >= options.ranks:
        backends.append("nccl")
    ratios: dict[Key, list[float]] = {}
    for backend in backends:
        ratios |= measure(backend, options.ranks, options.mib, options.rounds)
    origin = Origin.here("scaling", arguments)
    cells = [
        {"backend": backend, "dtype": dtype, "mib": mib, "method": method, "ratios": values}
        for (backend, dtype, mib, method), values in ratios.items()
    ]
    text = as_markdown(ratios, options.ranks, origin)
    keep(options.output, "scaling", origin, {"ranks": options.ranks, "cells": cells}, text)
    return 0


def measure(backend: str, ranks: int, sizes: list[int], rounds: int) -> dict[Key, list[float]]:
    """Ratios to the plain sum of the same round, as rank 0 saw them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    results = context.SimpleQueue()
    job = (ranks, backend, port, sizes, rounds, results)
    processes = [
        context.Process(target=_run_rank, args=(rank, *job), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    ratios: dict[Key, list[float]] = results.get()
    for process in processes:
        process.join(TIMEOUT.total_seconds())
    return ratios


def _run_rank(
    rank: int, ranks: int, backend: str, port: int, sizes: list[int], rounds: int, results: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=TIMEOUT)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    ratios: dict[Key, list[float]] = {}
    cells = [(dtype, mib) for dtype in DTYPES for mib in sizes]
    for dtype, mib in tqdm(cells, desc=backend, disable=rank > 0):
        buffers = _buffers(mib, dtype, device, ranks)
        for _ in range(rounds + 1):
            seconds = {name: _time(way, buffers) for name, way in WAYS.items()}
            for name, value in seconds.items():
                key = (backend, str(dtype).removeprefix("torch."), mib, name)
                ratios.setdefault(key, []).append(value / seconds["sum"])
    if rank == 0:
        results.put({key: values[1:] for key, values in ratios.items()})
    dist.destroy_process_group()


def _buffers(mib: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Buffers:
    numel = mib * 1024 * 1024 // dtype.itemsize
    return Buffers(
        torch.zeros(numel, dtype=dtype, device=device),
        [torch.zeros(numel // PIECES, dtype=dtype, device=device) for _ in range(PIECES)],
        ranks,
    )


def _time(way: Callable[[Buffers], None], buffers: Buffers) -> float:
    """Seconds from when all ranks are ready until the result is there."""
    dist.barrier()
    _synchronize(buffers)
    start = time.perf_counter()
    way(buffers)
    _synchronize(buffers)
    return time.perf_counter() - start


def _synchronize(buffers: Buffers) -> None:
    if buffers.flat.is_cuda:
        torch.cuda.synchronize()


def as_markdown(ratios: dict[Key, list[float]], ranks: int, origin: Origin) -> str:
    """The table, with what is needed to read and to repeat it."""
    methods = list(WAYS)[1:]
    rows = [
        [backend, dtype, str(mib), *(_cell(ratios[backend, dtype, mib, name]) for name in methods)]
        for backend, dtype, mib in dict.fromkeys(key[:3] for key in ratios)
    ]
    meaning = f"{ranks} ranks. Time over that of the sum of one flat buffer: median and quartiles."
    shown = table(["backend", "dtype", "MiB", *methods], rows, words=2)
    return page("A bucket's collective, by where it is scaled", origin, meaning, shown)


def _cell(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
