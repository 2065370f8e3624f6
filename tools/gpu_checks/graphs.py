"""CUDA graphs (``torch.compile(mode="reduce-overhead")``) on one rank, of a small GPT whose steps
wait for the host."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer

from benches.gradients import compare, gradients_of
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

TIMED_S: Final = 0.5


def measure(site: Site, note: Note) -> None:
    """Compare gradients with and without CUDA graphs, count recorded graphs, and time steps that
    launch them."""
    device = torch.device(site.device)
    torch._inductor.config.compile_threads = 1 if site.is_small else min(8, site.cores)
    dist.init_process_group(site.backend, store=dist.HashStore(), rank=0, world_size=1)
    expected: dict[str, Tensor] = {}
    base_ms = 0.0
    for name in COMPARED_IF_SMALL if site.is_small else COMPARED:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model, draw = (subjects.tiny_gpt if site.is_small else subjects.gpt)()
        model, batch = model.to(device), [tensor.to(device) for tensor in draw(0)]
        torch._inductor.config.ddp_fusion = name if name in MODES else None
        options: dict[str, Any] = {} if name == WITHOUT else {"mode": "reduce-overhead"}
        forward = torch.compile(
            DistributedDataParallel(model) if name in MODES else model, **options
        )

        def step(model: Any = model, forward: Any = forward, batch: Any = batch) -> None:
            model.zero_grad()
            forward(*batch).backward()

        for _ in range(WARM_UP):
            step()
        expected = expected or gradients_of(model)
        checked = compare(gradients_of(model), expected)
        wrong = checked.in_words(TOLERANCE)
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        ms = 1000 * timer.blocked_autorange(min_run_time=TIMED_S).median
        base_ms = ms if name == PLAIN else base_ms
        recorded = _recorded_graphs(device)
        if device.type == "cuda" and name != WITHOUT and not recorded:
            wrong = wrong or "no graph is recorded"
        figures = {
            "ms": ms,
            "time over no DDP": ms / base_ms if base_ms else None,
            "graphs recorded": float(recorded),
            "skipped": float(counters["inductor"]["cudagraph_skips"]),
            "gradients off by": checked.error,
        }
        note(Row(f"gpt: {name}", not wrong, wrong, figures))


def _recorded_graphs(device: torch.device) -> int:
    """Number of CUDA graphs that this process has recorded since Dynamo was reset."""
    manager = None
    if device.type == "cuda":
        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return manager.new_graph_id().id if manager else 0
