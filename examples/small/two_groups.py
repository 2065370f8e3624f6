"""Two modules of one model, each averaged over its own process group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401  It adds the flag.

torch._inductor.config.ddp_fusion = "concat"
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # DDP gives all ranks the parameters of rank 0.

everybody, pair = dist.new_group(), dist.new_group([0, 1])
encoder = DistributedDataParallel(nn.Linear(64, 256), process_group=everybody)
decoder = DistributedDataParallel(nn.Linear(256, 64, bias=False), process_group=pair)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.AdamW(parameters)


@torch.compile
def reconstruct(inputs: torch.Tensor) -> torch.Tensor:
    """Return the two modules' reconstruction of the inputs."""
    outputs: torch.Tensor = decoder(encoder(inputs).relu())
    return outputs


for step in range(12):
    inputs = torch.randn(16, 64)
    loss = (reconstruct(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
