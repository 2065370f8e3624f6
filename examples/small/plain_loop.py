"""A usual training loop: the model is compiled, and the backward is called outside of it."""

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

for step in range(12):
    inputs = torch.randn(16, 64)
    loss = (compiled(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
