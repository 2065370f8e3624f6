"""What runs in the processes of the bench, one for each model and way."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusion_passes
from storage.code import read_traffic
from storage.subjects import SUBJECTS, cap_mb_of
from workloads.memory import peak_bytes
from workloads.ways import OURS, Training, built, prepare

WARM_UP_STEPS = 3


def read_code(model: str, way: str) -> dict[str, Any]:
    """Traffic of the generated backward for two ranks, and what the package reports as copied."""
    inductor_config.fx_graph_cache = False  # A hit generates nothing.
    # Two ranks in one process: a process group that does nothing.
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    training = _prepare(way, model, torch.device("cpu"))
    _, codes = run_and_get_code(training.run)
    copied: dict[str, str] = {}
    if way in OURS:
        copied = {
            name: reason
            for report in fusion_passes.reports()
            for bucket in report.buckets
            for name, reason in bucket.copied
        }
    sizes = {name: p.nbytes for name, p in training.model.named_parameters()}
    return {
        "traffic": read_traffic(codes[-1]),
        "copied": {name: (reason, sizes[name]) for name, reason in copied.items()},
        "gradients": sum(sizes.values()),
    }


def serve(model: str, way: str, connection: Connection) -> None:
    """Train on one rank, as it is told: ``"steps"``, a number; ``"peak"``; ``"end"``."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    training = _prepare(way, model, device)
    for _ in range(WARM_UP_STEPS):
        training.run()
    connection.send("ready")
    while (command := connection.recv()) != "end":
        connection.send(peak_bytes(training) if command == "peak" else _seconds(training, command))
    dist.destroy_process_group()


def _prepare(way: str, model: str, device: torch.device) -> Training:
    made = built(SUBJECTS[model], device)
    return prepare(way, SUBJECTS[model], device, cap_mb=cap_mb_of(made), model=made)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _seconds(training: Training, steps: int) -> float:
    """Of so many steps: by CUDA events on a GPU."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            training.run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        training.run()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000
