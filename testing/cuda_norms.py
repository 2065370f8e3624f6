"""Backwards of norms, whose sums over rows and over columns read the same tensor.

From 5 * 2**20 elements on, with at least 4096 rows and twice as many rows as columns, Inductor
computes both by one kernel on a card (mix-order reduction, torch 2.14).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from testing.cuda_codegen import WORLD_SIZE
from testing.graphs import TensorSpec, reduce, reduce_into, tensor

ROWS: Final = 8192
WIDTH: Final = 768


def _layer_norm(x: Tensor, up: Tensor, gain: Tensor, shift: Tensor, down: Tensor) -> Tensor:
    normal = functional.layer_norm(functional.linear(x, up), gain.shape, gain, shift)
    return functional.linear(normal, down)


def _rms_norm(x: Tensor, up: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    return functional.linear(functional.rms_norm(functional.linear(x, up), gain.shape, gain), down)


def _llama_norm(x: Tensor, up: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    """As models of Llama write it."""
    inner = functional.linear(x, up)
    wide = inner.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return functional.linear(gain * normal.to(inner.dtype), down)


def _autocast_norm(x: Tensor, up: Tensor, gain: Tensor, shift: Tensor, down: Tensor) -> Tensor:
    """What autocast makes of fp32 parameters: products in bf16, and norms in fp32."""
    inner = functional.linear(x.bfloat16(), up.bfloat16())
    normal = functional.layer_norm(inner.float(), gain.shape, gain, shift)
    return functional.linear(normal.bfloat16(), down.bfloat16())


def _post_norm(
    x: Tensor, up: Tensor, down: Tensor, gain: Tensor, shift: Tensor, gain2: Tensor, shift2: Tensor
) -> Tensor:
    """Half of a block of the first transformer, behind a norm."""
    x = functional.layer_norm(functional.linear(x, up), gain.shape, gain, shift)
    inner = x + functional.gelu(functional.linear(x, down))
    return functional.layer_norm(inner, gain.shape, gain2, shift2)


def _pre_norm(
    x: Tensor, up: Tensor, down: Tensor, gain: Tensor, shift: Tensor, gain2: Tensor, shift2: Tensor
) -> Tensor:
    normal = functional.layer_norm(x, gain.shape, gain, shift)
    x = x + functional.gelu(functional.linear(normal, up))
    normal = functional.layer_norm(x, gain.shape, gain2, shift2)
    return x + functional.linear(normal, down)


def _layer_scale(x: Tensor, up: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    inner = functional.linear(x, up).softmax(-1)
    return functional.linear(inner * gain, down)


@dataclass(frozen=True)
class _Norm:
    """A forward with norms.

    Attributes:
        forward: called with rows, and with its parameters.
        shapes: of the parameters.
    """

    forward: Callable[..., Tensor]
    shapes: str


_NORMS: Final = {
    "layer_norm": _Norm(_layer_norm, "mvvm"),
    "rms_norm": _Norm(_rms_norm, "mvm"),
    "llama_norm": _Norm(_llama_norm, "mvm"),
    "autocast": _Norm(_autocast_norm, "mvvm"),
    "post_norm": _Norm(_post_norm, "mmvvvv"),
    "pre_norm": _Norm(_pre_norm, "mmvvvv"),
    "layer_scale": _Norm(_layer_scale, "mvm"),
}
NAMES: Final = tuple(_NORMS)


def norm_inputs(
    name: str, dtype: torch.dtype = torch.float32, *, rows: int = ROWS, width: int = WIDTH
) -> list[TensorSpec]:
    """Rows, and the parameters of a forward of :data:`NAMES`."""
    shapes = {"m": (width, width), "v": (width,)}
    parameters = [shapes[letter] for letter in _NORMS[name].shapes]
    return [tensor(*shape, dtype=dtype) for shape in [(rows, width), *parameters]]


def norm_step(name: str, module: str = "cards") -> Callable[..., Any]:
    """The backward of a forward of :data:`NAMES`, in the order in which gradients are made."""
    return partial(_step, name, module)


def norm_backward(name: str) -> Callable[..., Any]:
    """The same, whose gradients nothing reduces: they are returned."""
    return partial(_backward, name)


def norm_step_into_grads(name: str) -> Callable[..., Any]:
    """As :func:`norm_step`, added to gradients that exist: the inputs behind the parameters."""
    return partial(_step_into_grads, name)


def _step(name: str, module: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    numbered = enumerate(_gradients(name, inputs))
    return tuple(
        reduce(gradient, f"p{number}", module=module, divide=WORLD_SIZE)
        for number, gradient in reversed(list(numbered))
    )


def _backward(name: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    return _gradients(name, inputs)


def _step_into_grads(name: str, *inputs: Tensor) -> None:
    count = len(_NORMS[name].shapes)
    gradients = _gradients(name, inputs[: 1 + count])
    for number, (grad, gradient) in enumerate(zip(inputs[1 + count :], gradients, strict=True)):
        reduce_into(grad, gradient, f"p{number}", module="cards", divide=WORLD_SIZE)


def _gradients(name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    x, *values = inputs
    parameters = [value.detach().requires_grad_() for value in values]
    loss = _NORMS[name].forward(x, *parameters).float().square().mean()
    return torch.autograd.grad(loss, parameters)
