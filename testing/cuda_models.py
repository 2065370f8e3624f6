"""Backwards of the bench's models, in the sizes that people train, for a card. They are traced on
fake tensors, so that sizes cost nothing::

    with CardCompiler() as compiler:
        batch, parameters, buffers = compiler.call(model_inputs, "gpt2")
        compiler.generate(model_step("gpt2"), [*batch, *parameters, *buffers])
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from testing.cuda_codegen import WORLD_SIZE
from testing.graphs import TensorSpec, reduce

_TOOLS: Final = Path(__file__).parent.parent / "tools"
LAYERS: Final = 1
"""Of a model that has more: the next ones are like the last."""


def model_inputs(name: str) -> tuple[list[TensorSpec], ...]:
    """The batch, parameters and buffers of a model: the inputs of its backward. To be called
    in the process that traces it, first: how a model is made is no part of a backward."""
    model, batch = _made(name)
    groups: tuple[list[Tensor], ...] = ([*batch], [*model.parameters()], [*model.buffers()])
    return tuple(
        [TensorSpec(tuple(v.shape), v.dtype, "cpu", v.stride()) for v in values]
        for values in groups
    )


def model_step(name: str, *, autocast: bool = False) -> Callable[..., Any]:
    """The backward of a model, in the order in which gradients are made."""
    return functools.partial(_step, name, autocast)


def _step(name: str, autocast: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
    model, batch = _made(name)
    count = len(batch)
    names = [key for key, _ in model.named_parameters()]
    values = [value.detach().requires_grad_() for value in inputs[count : count + len(names)]]
    state = dict(zip(names, values, strict=True))
    buffers = [key for key, _ in model.named_buffers()]
    state |= zip(buffers, (b.clone() for b in inputs[count + len(names) :]), strict=True)
    # Attention as the card's own kernels compute it has no form on the CPU, where this is traced.
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = functional_call(model, state, inputs[:count], tie_weights=True)
    gradients = torch.autograd.grad(loss, values)
    return tuple(
        reduce(gradient, f"p{number}", module="cards", divide=WORLD_SIZE)
        for number, gradient in reversed(list(enumerate(gradients)))
    )


@functools.cache
def _made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sys.path.insert(0, str(_TOOLS))
    try:
        from workloads.models import Size, subject
    finally:
        sys.path.remove(str(_TOOLS))
    rows, tokens = _BATCHES[name]
    width = 1024 if name == "dlrm" else 768
    size = Size(width=width, layers=LAYERS, rows=rows, tokens=tokens, channels=64)
    made = subject(name, size)
    with torch.device("meta"):
        model = made.build()
    return model, made.batch(0)


_BATCHES: Final = {
    "gpt2": (8, 1024),
    "bert": (32, 512),
    "llama": (4, 2048),
    "mlp": (16, 1024),
    "resnet": (16, 448),
    "dlrm": (64, 1024),
}
"""Sequences, images or examples, and their tokens; an image's edge in pixels is half of that."""
NAMES: Final = tuple(_BATCHES)
