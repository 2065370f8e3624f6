"""On one rank, a small GPT whose steps wait for the host: with CUDA graphs
(``torch.compile(mode="reduce-overhead")``), and with buckets in memory that NCCL has registered."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from benches.gradients import compare, gradients_of
from benches.results import Row
from fusion_passes.config import MemoryOption
from fusion_passes.reducer import memory
from fusion_passes.state import process_state
from fusion_passes.torch_private import registered_memory
from gpu_checks import subjects
from gpu_checks.net import TOLERANCE
from gpu_checks.sites import Note, Site
from testing.registered import Registry, registered_by_nobody
from testing.scenarios.entries import MODES
from workloads.ways import EAGER, PLAIN

WITHOUT: Final = "no DDP, no CUDA graphs"
COMPARED: Final = (WITHOUT, PLAIN, *MODES)
COMPARED_IF_SMALL: Final = (PLAIN, "concat")

WARM_UP: Final = 4
"""Steps that compile, warm up and record, or have buckets that last."""

ROUNDS: Final = 5
STEPS: Final = 10

MEMORIES: Final[tuple[MemoryOption, ...]] = ("plain", "plain", "registered")
"""The first one fills the compiler's caches for both others; its row is replaced."""

REGISTRATION_LOG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "REG,TUNING"}
"""Environment variables: NCCL says what it registers, and which kernels it picks, in a log."""


def graphs(site: Site, note: Note) -> None:
    """Compare gradients with and without CUDA graphs, count those that are recorded, and time steps
    that launch them."""
    device = _join(site)
    expected: dict[str, Tensor] = {}
    base_ms = 0.0
    for name in COMPARED_IF_SMALL if site.is_small else COMPARED:
        options: dict[str, Any] = {} if name == WITHOUT else {"mode": "reduce-overhead"}
        flag = name if name in MODES else None
        model, step = _training(site, device, flag, functools.partial(torch.compile, **options))
        before, skips = recorded_graphs(device), counters["inductor"]["cudagraph_skips"]
        for _ in range(WARM_UP):
            step()
        expected = expected or gradients_of(model)
        checked = compare(gradients_of(model), expected)
        wrong = checked.in_words(TOLERANCE)
        ms = _milliseconds(device, step, STEPS, ROUNDS)
        base_ms = ms if name == PLAIN else base_ms
        found = {
            "ms": ms,
            "time over no DDP": ms / base_ms if base_ms else None,
            "graphs recorded": float(recorded_graphs(device) - before),
            "skipped": float(counters["inductor"]["cudagraph_skips"] - skips),
            "gradients off by": checked.error,
        }
        if device.type == "cuda" and name != WITHOUT and not found["graphs recorded"]:
            wrong = wrong or "no graph is recorded"
        note(Row(f"gpt: {name}", not wrong, wrong, found))


def registered(site: Site, note: Note) -> None:
    """Train with buckets in plain memory and in memory that NCCL has registered, beside eager DDP,
    and have it forget that memory by destroying the process group."""
    device = _join(site)
    model, step = _training(site, device, None, DistributedDataParallel)
    step()
    expected = gradients_of(model)
    note(Row(f"gpt: {EAGER}", figures={"ms": _milliseconds(device, step, STEPS, ROUNDS)}))
    base: list[float] = []
    with _noting(site) as registry:
        for kind in MEMORIES[site.is_small :]:
            flag = fusion_passes.FusionConfig(mode="concat", memory=kind)
            model, step = _training(site, device, flag, torch.compile)
            times = [_milliseconds(device, step) for _ in range(WARM_UP)][:2]
            checked = compare(gradients_of(model), expected)
            wrong = checked.in_words(TOLERANCE)
            times.append(_milliseconds(device, step, STEPS, ROUNDS))
            base = times if kind == "plain" else base
            figures = dict(zip(("first step, ms", "second step, ms", "ms"), times, strict=True))
            over = ("first over plain", "second over plain", "time over plain")
            figures |= {name: own / b for name, own, b in zip(over, times, base, strict=True)}
            figures["gradients off by"] = checked.error
            words = wrong or fusion_passes.report().modules[-1].memory
            note(Row(f"gpt: {kind}", not wrong, words, figures))
        if site.is_small:
            process_state.reset()
        else:
            dist.destroy_process_group()
        counts = f"{len(registry.sizes)} registered, {registry.ended} deregistered"
        where = "on the host, in the place of NCCL" if site.is_small else "with NCCL"
        is_right = (len(registry.sizes), registry.ended) == (1, 1)
        note(Row("gpt: pieces of memory", is_right, f"{counts}, {where}"))


@contextlib.contextmanager
def _noting(site: Site) -> Iterator[Registry]:
    """What is registered, and deregistered; without NCCL, with a fake of its memory."""
    if site.is_small:
        with registered_by_nobody() as registry:
            yield registry
        return
    registry, deregister = Registry(), registered_memory._deregister

    class Noted(registered_memory.RegisteredMemory):
        def __init__(self, group: Any, device: torch.device, nbytes: int) -> None:
            super().__init__(group, device, nbytes)
            registry.sizes.append(nbytes)

    def noted(*values: Any) -> None:
        deregister(*values)
        registry.ended += 1

    with (
        mock.patch.object(memory, "RegisteredMemory", Noted),
        mock.patch.object(registered_memory, "_deregister", noted),
    ):
        yield registry


def _join(site: Site) -> torch.device:
    """Make a process group of one rank, bound to the GPU: for others NCCL registers nothing."""
    torch._inductor.config.compile_threads = 1 if site.is_small else min(8, site.cores)
    bound = None if site.is_small else torch.device("cuda", 0)
    logs = Path(site.directory) / "logs"
    logs.mkdir(exist_ok=True)
    os.environ |= REGISTRATION_LOG | {"NCCL_DEBUG_FILE": str(logs / "nccl-%p.log")}
    store = dist.HashStore()
    dist.init_process_group(site.backend, store=store, rank=0, world_size=1, device_id=bound)
    return bound or torch.device("cpu")


def _training(
    site: Site, device: torch.device, flag: Any, compiled: Callable[[nn.Module], Any]
) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and what makes a step with fresh gradients.

    Args:
        site: where.
        device: of the model.
        flag: value of ``ddp_fusion``; without it the model is in DDP only if that is eager.
        compiled: makes of a module what is trained.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, draw = (subjects.tiny_gpt if site.is_small else subjects.gpt)()
    model, batch = model.to(device), [tensor.to(device) for tensor in draw(0)]
    torch._inductor.config.ddp_fusion = flag
    forward = compiled(DistributedDataParallel(model) if flag else model)

    def step() -> None:
        model.zero_grad()
        forward(*batch).backward()

    return model, step


def _milliseconds(
    device: torch.device, step: Callable[[], None], steps: int = 1, rounds: int = 1
) -> float:
    """Of a step of some in a row: the median of rounds."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - begin) / steps)
    return statistics.median(found)


def recorded_graphs(device: torch.device) -> int:
    """CUDA graphs that this process has recorded and kept."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index, create_if_none_exists=False)
    waiting = (
        [] if manager is None else [node for nodes in manager.roots.values() for node in nodes]
    )
    count = 0
    while waiting:
        node = waiting.pop()
        waiting += [child for nodes in node.children.values() for child in nodes]
        count += 1
    return count
