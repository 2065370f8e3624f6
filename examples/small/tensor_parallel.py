"""Tensor parallelism over one dimension of a mesh, DDP over the other: 2 x 2 processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401  It adds the flag.

torch._inductor.config.ddp_fusion = "concat"
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(mesh["dp"].get_local_rank())  # Ranks of one tp group see the same batch.
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
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
