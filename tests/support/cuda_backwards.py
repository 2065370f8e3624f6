"""Backwards with interesting CUDA code: of layers, of norms, of the bench's models. They are traced
on fake tensors, so that sizes cost nothing::

    with CardCompiler() as compiler:
        compiler.generate(norm_step("llama_norm"), norm_inputs("llama_norm"))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.graphs import TensorSpec, reduce, reduce_into, tensor
from workloads.models import Size, subject

Forward = Callable[..., Tensor]
Step = Callable[..., Any]

ON_CARDS: Final = "ddp3"
"""A DDP module over NCCL: see :mod:`tests.support.graphs`."""


def gradients(forward: Forward, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a forward's mean square.

    Args:
        forward: called with ``inputs``.
        count: number of parameters, which are the last inputs.
        inputs: the inputs of the graph.
    """
    parameters = [value.detach().requires_grad_() for value in inputs[-count:]]
    loss = forward(*inputs[:-count], *parameters).float().square().mean()
    return torch.autograd.grad(loss, parameters)


def train(forward: Forward, count: int, *inputs: Tensor) -> list[Tensor]:
    """The gradients of :func:`gradients`, averaged in the order in which they are computed."""
    return averaged(gradients(forward, count, *inputs), last_first=True)


def train_into(forward: Forward, count: int, *inputs: Tensor) -> None:
    """The averages of :func:`train`, added to existing gradients: the inputs after the
    parameters."""
    made = gradients(forward, count, *inputs[:-count])
    for number, (grad, gradient) in enumerate(zip(inputs[-count:], made, strict=True)):
        reduce_into(grad, gradient, f"p{number}", module=ON_CARDS)


def averaged(
    values: Sequence[Tensor], module: str = ON_CARDS, *, last_first: bool = False
) -> list[Tensor]:
    """The averages over a DDP module's group; a backward computes the last gradient first."""
    numbered = list(enumerate(values))
    return [
        reduce(gradient, f"p{number}", module=module)
        for number, gradient in (reversed(numbered) if last_first else numbered)
    ]


# --- Layers --------------------------------------------------------------------------------------

WIDTH: Final = 256


def feed_forward(x: Tensor, *parameters: Tensor) -> Tensor:
    """Half of a transformer block."""
    gain, shift, up, up_bias, down, down_bias = parameters
    normal = functional.layer_norm(x, (WIDTH,), gain, shift)
    inner = functional.gelu(functional.linear(normal, up, up_bias))
    return x + functional.linear(inner, down, down_bias)


def block_inputs(dtype: torch.dtype = torch.float32) -> list[TensorSpec]:
    inner = 4 * WIDTH
    shapes = [(WIDTH,), (WIDTH,), (inner, WIDTH), (inner,), (WIDTH, inner), (WIDTH,)]
    return [tensor(*shape, dtype=dtype) for shape in [(64, WIDTH), *shapes]]


def _convolved(x: Tensor, *weights: Tensor) -> Tensor:
    return functools.reduce(functional.conv2d, weights, x)


def _in_bf16(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = functional.linear(x.bfloat16(), weight.bfloat16()).relu()
    return x


step_on_cards: Final[Step] = partial(train, feed_forward, 6)
convolution_step: Final[Step] = partial(train, _convolved, 3)
autocast_step: Final[Step] = partial(train, _in_bf16, 3)


def given(*values: Tensor) -> list[Tensor]:
    return averaged(values)


def biases_on_hosts(*inputs: Tensor) -> list[Tensor]:
    return averaged([value.sum(0) for value in inputs], "ddp0")


def pointwise(*inputs: Tensor) -> list[Tensor]:
    return averaged([value.sin() for value in inputs])


def multiplied_behind(*inputs: Tensor) -> list[Tensor]:
    """Averages that are multiplied in the same graph, as in an optimizer for matrices."""
    averages = pointwise(*inputs)
    return averages + [torch.mm(average, average.T) for average in averages]


def multiplied_before(*inputs: Tensor) -> list[Tensor]:
    """Gradients that another node, a product, reads too."""
    values = [value.sin() for value in inputs]
    return averaged(values) + [torch.mm(gradient, gradient.T) for gradient in values]


# --- Norms, whose sums over rows and over columns read the same tensor ---------------------------
#
# From 5 * 2**20 elements on, with at least 4096 rows and twice as many rows as columns, Inductor
# computes both by one kernel on a card (mix-order reduction, torch 2.14).

NORM_ROWS: Final = 8192
NORM_WIDTH: Final = 768


def _layer_norm(x: Tensor, up: Tensor, gain: Tensor, shift: Tensor, down: Tensor) -> Tensor:
    normal = functional.layer_norm(functional.linear(x, up), gain.shape, gain, shift)
    return functional.linear(normal, down)


def _llama_norm(x: Tensor, up: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    """Written as in models of Llama."""
    inner = functional.linear(x, up)
    wide = inner.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return functional.linear(gain * normal.to(inner.dtype), down)


def _autocast_norm(x: Tensor, up: Tensor, gain: Tensor, shift: Tensor, down: Tensor) -> Tensor:
    """fp32 parameters under autocast: products in bf16, and norms in fp32."""
    inner = functional.linear(x.bfloat16(), up.bfloat16())
    normal = functional.layer_norm(inner.float(), gain.shape, gain, shift)
    return functional.linear(normal.bfloat16(), down.bfloat16())


def _post_norm(x: Tensor, up: Tensor, down: Tensor, *norms: Tensor) -> Tensor:
    """Half of an older transformer block, between two norms."""
    gain, shift, gain2, shift2 = norms
    x = functional.layer_norm(functional.linear(x, up), gain.shape, gain, shift)
    inner = x + functional.gelu(functional.linear(x, down))
    return functional.layer_norm(inner, gain.shape, gain2, shift2)


def _layer_scale(x: Tensor, up: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    inner = functional.linear(x, up).softmax(-1)
    return functional.linear(inner * gain, down)


_NORMS: Final[dict[str, tuple[Forward, str]]] = {
    "layer_norm": (_layer_norm, "mvvm"),
    "llama_norm": (_llama_norm, "mvm"),
    "autocast": (_autocast_norm, "mvvm"),
    "post_norm": (_post_norm, "mmvvvv"),
    "layer_scale": (_layer_scale, "mvm"),
}
"""Forwards, and a string that says which of their parameters are matrices and vectors."""
NORMS: Final = tuple(_NORMS)


def norm_inputs(
    name: str, dtype: torch.dtype = torch.float32, *, rows: int = NORM_ROWS, width: int = NORM_WIDTH
) -> list[TensorSpec]:
    """Rows, and the parameters of a forward of :data:`NORMS`."""
    shapes = {"m": (width, width), "v": (width,)}
    parameters = [shapes[letter] for letter in _NORMS[name][1]]
    return [tensor(*shape, dtype=dtype) for shape in [(rows, width), *parameters]]


def norm_step(name: str, step: Step = train) -> Step:
    """The backward of a forward of :data:`NORMS`: :func:`train` or another of these functions."""
    forward, shapes = _NORMS[name]
    return partial(step, forward, len(shapes))


# --- The bench's models, in the sizes that people train ------------------------------------------

_BATCHES: Final = {
    "gpt2": (8, 1024),
    "bert": (32, 512),
    "llama": (4, 2048),
    "mlp": (16, 1024),
    "resnet": (16, 448),
    "dlrm": (64, 1024),
}
"""Sequences, images or examples, and their tokens; the edge of an image in pixels is half of
that."""
MODELS: Final = tuple(_BATCHES)


def model_inputs(name: str) -> tuple[list[TensorSpec], ...]:
    """The batch, parameters and buffers of a model: the inputs of its backward. Call it first in
    the process that traces it, because the construction of a model is not a part of its
    backward."""
    model, batch = _made(name)
    groups: tuple[list[Tensor], ...] = ([*batch], [*model.parameters()], [*model.buffers()])
    return tuple(
        [TensorSpec(tuple(v.shape), v.dtype, "cpu", v.stride()) for v in values]
        for values in groups
    )


def train_model(name: str, autocast: bool, *inputs: Tensor) -> list[Tensor]:
    """The averages of a model's gradients, in the order in which they are computed."""
    model, batch = _made(name)
    names = [key for key, _ in model.named_parameters()]
    count = len(batch)
    values = [value.detach().requires_grad_() for value in inputs[count : count + len(names)]]
    buffers = [buffer.clone() for buffer in inputs[count + len(names) :]]
    names += [key for key, _ in model.named_buffers()]
    state = dict(zip(names, [*values, *buffers], strict=True))
    # The GPU's own attention kernels have no CPU version, and this is traced on the CPU.
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = functional_call(model, state, inputs[:count], tie_weights=True)
    return averaged(torch.autograd.grad(loss, values), last_first=True)


@functools.cache
def _made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows, tokens = _BATCHES[name]
    width = 1024 if name == "dlrm" else 768
    # More layers would repeat the last one.
    size = Size(width=width, layers=1, rows=rows, tokens=tokens, channels=64)
    made = subject(name, size)
    with torch.device("meta"):
        model = made.build()
    return model, made.batch(0)
