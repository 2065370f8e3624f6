"""Several batches per step: gradients are sent once, after the last batch."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401  It adds the flag.

torch._inductor.config.ddp_fusion = "concat"
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # DDP gives all ranks the parameters of rank 0.
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
ddp = DistributedDataParallel(model)
compiled = torch.compile(ddp)
optimizer = torch.optim.AdamW(model.parameters())
BATCHES = 4

for step in range(12):
    for batch in range(BATCHES):
        inputs = torch.randn(16, 64)
        is_last = batch == BATCHES - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = (compiled(inputs) - inputs).square().mean() / BATCHES
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {BATCHES * loss.item():.3f}")
dist.destroy_process_group()
