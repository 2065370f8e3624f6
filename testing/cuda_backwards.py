"""Backwards whose code for a card is worth looking at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from testing.cuda_codegen import WORLD_SIZE
from testing.graphs import TensorSpec, reduce, reduce_into, tensor


def train(
    forward: Callable[..., Tensor], count: int, module: str, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of a forward's mean square, reduced in the order in which they are made.

    Args:
        forward: called with ``inputs``.
        count: how many of them, the last ones, are parameters.
        module: whose parameters they are.
        inputs: as the graph gets them.
    """
    parameters = [value.detach().requires_grad_() for value in inputs[-count:]]
    loss = forward(*inputs[:-count], *parameters).square().mean()
    gradients = list(enumerate(torch.autograd.grad(loss, parameters)))
    return tuple(
        reduce(gradient, f"p{number}", module=module, divide=WORLD_SIZE)
        for number, gradient in reversed(gradients)
    )


WIDTH: Final = 256
NAMES: Final = ("x", "gain", "shift", "up", "up_bias", "down", "down_bias")


def feed_forward(x: Tensor, *parameters: Tensor) -> Tensor:
    """Half of a transformer's block."""
    gain, shift, up, up_bias, down, down_bias = parameters
    normal = functional.layer_norm(x, (WIDTH,), gain, shift)
    inner = functional.gelu(functional.linear(normal, up, up_bias))
    return x + functional.linear(inner, down, down_bias)


def block_inputs(dtype: torch.dtype = torch.float32) -> list[TensorSpec]:
    inner = 4 * WIDTH
    shapes = [(WIDTH,), (WIDTH,), (inner, WIDTH), (inner,), (WIDTH, inner), (WIDTH,)]
    return [tensor(*shape, dtype=dtype) for shape in [(64, WIDTH), *shapes]]


def step_on_cards(*inputs: Tensor) -> tuple[Tensor, ...]:
    return train(feed_forward, 6, "cards", *inputs)


def step_into_grads(*inputs: Tensor) -> None:
    grads = inputs[7:]
    parameters = [value.detach().requires_grad_() for value in inputs[1:7]]
    loss = feed_forward(inputs[0], *parameters).square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    for number, (grad, gradient) in enumerate(zip(grads, gradients, strict=True)):
        reduce_into(grad, gradient, f"p{number}", module="cards", divide=WORLD_SIZE)


def reduced(gradients: list[Tensor], module: str = "cards") -> list[Tensor]:
    return [
        reduce(gradient, f"p{number}", module=module, divide=WORLD_SIZE)
        for number, gradient in enumerate(gradients)
    ]


def given(*gradients: Tensor) -> list[Tensor]:
    return reduced(list(gradients))


def biases(*inputs: Tensor) -> list[Tensor]:
    return reduced([value.sum(0) for value in inputs])


def biases_on_hosts(*inputs: Tensor) -> list[Tensor]:
    return reduced([value.sum(0) for value in inputs], "hosts")


def pointwise(*inputs: Tensor) -> list[Tensor]:
    return reduced([value.sin() for value in inputs])


def convolved(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = functional.conv2d(x, weight)
    return x


def convolution_step(*inputs: Tensor) -> tuple[Tensor, ...]:
    return train(convolved, 3, "cards", *inputs)


def autocast_step(*inputs: Tensor) -> tuple[Tensor, ...]:
    return train(_in_bf16, 3, "cards", *inputs)


def _in_bf16(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = functional.linear(x.bfloat16(), weight.bfloat16()).relu()
    return x.float()


def multiplied_behind(*inputs: Tensor) -> list[Tensor]:
    """Averages that are multiplied in the same graph, as an optimizer for matrices does."""
    averages = reduced([value.sin() for value in inputs])
    return averages + [torch.mm(average, average.T) for average in averages]


def multiplied_before(*inputs: Tensor) -> list[Tensor]:
    """Gradients that something else reads too, a product."""
    gradients = [value.sin() for value in inputs]
    return reduced(gradients) + [torch.mm(gradient, gradient.T) for gradient in gradients]
