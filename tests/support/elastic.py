"""A training that goes on from its checkpoint: to be run under torchrun, which starts it anew when
a rank dies.

    torchrun --max-restarts=1 -m tests.support.elastic DIRECTORY {eager,concat} [STEP]

In its first life, rank 1 dies in step ``STEP``. The last checkpoint is in ``DIRECTORY``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from testing import models

STEPS = 4
CHECKPOINT = "checkpoint.pt"


def train(directory: Path, way: str, dies_in: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if way != "eager":
        torch._inductor.config.ddp_fusion = way
    ddp = DistributedDataParallel(models.mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.5)
    step, checkpoint = 0, directory / CHECKPOINT
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step = saved["step"]
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    compiled = ddp if way == "eager" else torch.compile(ddp)
    first = step
    while step < STEPS:
        if step == dies_in and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        generator = torch.Generator().manual_seed(10 * step + rank)
        rows = torch.randint(-2, 3, (4, models.WIDTH), generator=generator).float()
        optimizer.zero_grad()
        compiled(rows).sum().backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, directory / "new.pt")
            (directory / "new.pt").replace(checkpoint)
        dist.barrier()
    if rank == 0:
        averaged = sum(item.count for item in fusion_passes.report().backwards)
        print(f"steps {first} to {STEPS}, {averaged} averaged")
    # A thread of Gloo that has just ended a collective needs Python to drop it, and a process group
    # that is dropped waits for its threads without letting go of Python: one run in about twenty
    # hung here with eager DDP alone (torch 2.13, in ~ProcessGroupGloo).
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1)
