"""Programs about what is made and dropped, and what must stay flat."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fault_runs.rank import Run
from fault_runs.training import batch, build, wait_for_all

LIVES = 3
STEPS_OF_LIFE = 3


def remake_groups(run: Run) -> dict[str, Any]:
    """Make the process group, train, and destroy it; several times in one process."""
    result: dict[str, Any] = {}
    for life in range(LIVES):
        torch._dynamo.reset()
        run.init_group(f"store-{life}")
        result = {"parameters": _train(run, int(run.options.get("steps", STEPS_OF_LIFE)))}
        gc.collect()
        # Gloo ends what another rank is still in, without the flag too.
        wait_for_all(run)
        dist.destroy_process_group()
    return result


def make_many(run: Run) -> dict[str, Any]:
    """Make DDP modules and drop them; each tenth is trained."""
    run.init_group()
    modules = int(run.options.get("modules", 200))
    parameters, before = list[float](), dict[str, int]()
    for number in range(modules):
        if number % 10 == 0:
            torch._dynamo.reset()
            parameters = _train(run, 1)
        else:
            build(run)
        if number == modules // 2:
            before = _measures()
        run.note("step")
    after = _measures()
    dist.destroy_process_group()
    return {"parameters": parameters, "growth": {k: after[k] - before[k] for k in after}}


def train_long(run: Run) -> dict[str, Any]:
    """Train many steps, and measure what has grown in the last two thirds."""
    run.init_group()
    _, ddp = build(run)
    forward = torch.compile(ddp) if run.is_compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    steps = int(run.options.get("steps", 1000))
    before = dict[str, int]()
    for step in range(steps):
        run.step = step
        optimizer.zero_grad()
        forward(batch(step, run.rank)).square().sum().backward()
        optimizer.step()
        if step == steps // 3:
            before = _measures()
    after = _measures()
    parameters = [float(parameter.double().sum()) for parameter in ddp.parameters()]
    del forward, ddp
    dist.destroy_process_group()
    return {"parameters": parameters, "growth": {k: after[k] - before[k] for k in after}}


def _train(run: Run, steps: int) -> list[float]:
    net, ddp = build(run)
    forward = torch.compile(ddp) if run.is_compiled else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        run.step = step
        optimizer.zero_grad()
        forward(batch(step, run.rank)).square().sum().backward()
        optimizer.step()
    return [float(parameter.double().sum()) for parameter in net.parameters()]


def _measures() -> dict[str, int]:
    """What must stay flat, when all ranks are in the same place."""
    gc.collect()
    dist.barrier()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    measures = {
        "memory_kb": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "store_keys": dist.distributed_c10d._get_default_store().num_keys(),
        "objects": len(gc.get_objects()),
    }
    dist.barrier()
    return measures
