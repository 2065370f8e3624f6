"""A process of its own whose backward is compiled with or without donated buffers.

    python -m tests.support.retained_graph on|off

The flag is set, and the module is not in DDP. With ``off`` the backward of one forward runs twice.
Prints the largest difference between both gradients over the largest element.
"""

from __future__ import annotations

import sys

import torch
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import fusion_passes  # noqa: F401  It adds the flag.


class Waves(nn.Module):
    """Its backward can write into what its forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin().exp()
        return x


def main(donates: bool) -> float:
    """Train, and return what is printed."""
    torch._functorch.config.donated_buffer = donates
    inductor_config.ddp_fusion = "concat"
    torch.manual_seed(0)
    model = Waves()
    loss = torch.compile(model)(torch.randn(32, 32)).square().sum()
    if donates:
        loss.backward()
        return 0.0
    gradients = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        grads = [parameter.grad for parameter in model.parameters()]
        gradients.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
    first, second = gradients
    return ((first - second).abs().max() / first.abs().max()).item()


if __name__ == "__main__":
    print(main(sys.argv[1] == "on"))
