"""``torch.compile(mode="reduce-overhead")``: whether gradients are what they are without, how many
CUDA graphs are recorded, and what a step takes that launches them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from benches.gradients import compare
from benches.results import Row
from gpu_checks import subjects
from gpu_checks.net import TOLERANCE
from gpu_checks.sites import Note, Site
from testing.scenarios.entries import MODES
from workloads.ways import PLAIN

WITHOUT: Final = "no DDP, no CUDA graphs"
COMPARED: Final = (WITHOUT, PLAIN, *MODES)
COMPARED_IF_SMALL: Final = (PLAIN, "concat")

WARM_UP: Final = 4
"""Steps that compile, warm up and record."""

ROUNDS: Final = 5
STEPS: Final = 10


def measure(site: Site, note: Note) -> None:
    """Compare the modes on a small GPT, whose steps wait for the host without CUDA graphs."""
    device = torch.device("cuda", 0) if site.device == "cuda" else torch.device("cpu")
    dist.init_process_group(site.backend, store=dist.HashStore(), rank=0, world_size=1)
    expected: dict[str, Tensor] = {}
    base_ms = 0.0
    torch._inductor.config.compile_threads = 1 if site.is_small else min(8, site.cores)
    for name in COMPARED_IF_SMALL if site.is_small else COMPARED:
        model, step = _training(name, device, is_small=site.is_small)
        before, skips = recorded_graphs(device), counters["inductor"]["cudagraph_skips"]
        for _ in range(WARM_UP):
            step()
        gradients = {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}
        expected = expected or gradients
        checked = compare(gradients, expected, {}, {})
        ms = 1000 * _seconds(device, step)
        base_ms = ms if name == PLAIN else base_ms
        found = {
            "ms": ms,
            "time over no DDP": ms / base_ms if base_ms else None,
            "graphs recorded": float(recorded_graphs(device) - before),
            "skipped": float(counters["inductor"]["cudagraph_skips"] - skips),
            "gradients off by": checked.error,
        }
        wrong = [f"{checked.worst} is off"] if not checked.error <= TOLERANCE else []
        if checked.missing:
            wrong.append(f"no gradient of {', '.join(checked.missing)}")
        if device.type == "cuda" and name != WITHOUT and not found["graphs recorded"]:
            wrong.append("no graph is recorded")
        note(Row(f"gpt: {name}", not wrong, "; ".join(wrong), found))


def _training(
    name: str, device: torch.device, *, is_small: bool
) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and what makes a step with fresh gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, draw = (subjects.tiny_gpt if is_small else subjects.gpt)()
    model, batch = model.to(device), [tensor.to(device) for tensor in draw(0)]
    torch._inductor.config.ddp_fusion = name if name in MODES else None
    options: dict[str, Any] = {} if name == WITHOUT else {"mode": "reduce-overhead"}
    wrapped = DistributedDataParallel(model) if name in MODES else model
    forward = torch.compile(wrapped, **options)

    def step() -> None:
        model.zero_grad()
        forward(*batch).backward()

    return model, step


def _seconds(device: torch.device, step: Callable[[], None]) -> float:
    """Of a step of some in a row."""
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / STEPS)
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
