"""A step that is compiled as a whole: forward, backward and clipping."""

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
optimizer = torch.optim.AdamW(model.parameters())


@torch.compile
def train_step(inputs: torch.Tensor) -> torch.Tensor:
    """Compute clipped gradients, and return the loss."""
    loss: torch.Tensor = (ddp(inputs) - inputs).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


for step in range(12):
    loss = train_step(torch.randn(16, 64))
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
