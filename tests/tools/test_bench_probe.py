"""The notes of when a gradient is ready, in the code that Inductor generates."""

from __future__ import annotations

import re

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from bench_steps.probe import ReadyClock
from testing.fake_world import without_kernels


def test_a_gradient_of_a_convolution_is_noted_before_the_next_one() -> None:
    """Inductor's scheduler moves what frees no memory to the end, if it is let."""
    torch._dynamo.reset()
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    compiled = torch.compile(nn.Sequential(*parts))
    images = torch.ones(2, 8, 8, 8)

    def step() -> Tensor:
        loss = compiled(images).square().mean()
        loss.backward()
        return loss

    with inductor_config.patch(fx_graph_cache=False, post_grad_custom_post_pass=None):
        clock = ReadyClock(torch.device("cpu"))
        with without_kernels():
            _, codes = run_and_get_code(step)
    called = re.findall(r" = torch\.ops\.\w+\.(note_ready|convolution_backward)\b", codes[-1])
    assert called == ["convolution_backward", "note_ready", "note_ready"] * 4
    assert len(clock.read(0.0)) == 8
    sizes = [parameter.nbytes for layer in layers for parameter in layer.parameters()]
    assert sorted(clock.sizes) == sorted(sizes)
