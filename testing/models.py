"""Tiny models to train, and their data.

Most are *exact*: weights and data are small whole numbers, the loss is linear in the output, and
each parameter moves by one against its gradient's sign, which keeps it whole. So no sum or product
is ever rounded, and the order in which anything is summed (by a kernel, by Gloo) does not matter:
two ways of training must agree in every bit. The others (normalisation, softmax) do round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
OUTPUTS = 4
VOCABULARY = 64
CONTEXT = 16

Batch = tuple[Tensor, Tensor]


def fill_whole(module: nn.Module, seed: int = 0) -> nn.Module:
    """Sets each parameter to whole numbers from -2 to 2, the same on every rank."""
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return module


def mlp(
    depth: int = 3, outputs: int = OUTPUTS, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Exact. ``depth`` linear layers with bias."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, outputs)).to(dtype)
    fill_whole(model)
    return model


class Tied(nn.Module):
    """Exact. Two layers share a weight, as an embedding and an output layer often do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())[:, :OUTPUTS]


class Checkpointed(nn.Module):
    """Exact. The middle layers are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1:4], x, use_reentrant=False)
        return self.layers[4](x)


class Switched(nn.Module):
    """Exact. ``negative`` is a Python flag: changing it makes Dynamo compile anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.negative = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return -x if self.negative else x


class TwoDtypes(nn.Module):
    """Exact in fp32; in bf16 each gradient is rounded once, which any order of sums survives."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.single_again = nn.Linear(WIDTH, WIDTH)
        self.low_again = nn.Linear(WIDTH, OUTPUTS, dtype=torch.bfloat16)
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(self.single(x).relu().bfloat16()).relu()
        return self.low_again(self.single_again(x.float()).bfloat16()).float()


class Layouts(nn.Module):
    """Exact. Weights that are not contiguous: channels last and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, WIDTH, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.transposed = nn.Parameter(torch.empty(WIDTH, OUTPUTS).t())
        self.permuted = nn.Parameter(torch.empty(3, OUTPUTS, 2).permute(2, 0, 1))
        self.plain = nn.Linear(OUTPUTS, OUTPUTS)
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        images = F.pad(x, (0, 24)).reshape(-1, 2, 4, 4)
        features = self.conv(images).sum((2, 3))
        x = self.plain(F.linear(features, self.transposed))
        return x * self.permuted.sum((0, 1))


class Branching(nn.Module):
    """Exact. Takes the branches ``a``, ``b`` and ``c`` that it is asked to take; they may have
    other dtypes."""

    def __init__(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), outputs: int = WIDTH
    ) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, outputs)
        fill_whole(self)
        for name, dtype in dtypes.items():
            getattr(self, name).to(dtype)

    def forward(self, x: Tensor, takes: str) -> Tensor:
        x = self.first(x).relu()
        for name in takes:
            branch = getattr(self, name)
            x = x + branch(x.to(branch.weight.dtype)).sign().to(x.dtype) * branch.weight.sum()
        return self.last(x)


class Shapes(nn.Module):
    """Exact. A scalar, an empty parameter, and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.nothing = nn.Parameter(torch.empty(0, OUTPUTS))
        self.row = nn.Parameter(torch.empty(1, OUTPUTS))
        self.layer = nn.Linear(WIDTH, OUTPUTS)
        fill_whole(self, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.layer(x), self.nothing])
        return x * self.scale + self.row


class Complex(nn.Module):
    """Exact. Two complex weights beside two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.complex64))
        self.second = nn.Parameter(torch.empty(WIDTH, OUTPUTS, dtype=torch.complex64))
        self.layer = nn.Linear(WIDTH, WIDTH)
        fill_whole(self)
        with torch.no_grad():
            self.first.add_(self.first.conj() * 1j)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.view_as_real(self.layer(x).to(torch.complex64) @ self.first @ self.second)
        return out[..., 0] + 2 * out[..., 1]


class ConvNet(nn.Module):
    """Rounds. Convolutions and BatchNorm; ``channels_last`` for its weights.

    The convolutions have no bias: BatchNorm takes it out again, so that its gradient would be
    nothing but rounding errors, of which no two kernels make the same.
    """

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, WIDTH, 3, bias=False),
            nn.BatchNorm2d(WIDTH),
        )
        self.head = nn.Linear(WIDTH, OUTPUTS)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).relu().mean((2, 3)))


def gpt2(layers: int = 2) -> nn.Module:
    """Rounds. Some layers of GPT-2, with its tied embedding, and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=32,
            n_layer=layers,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def whole_rows(generator: Generator, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of whole numbers, and what each output counts in the loss."""
    rows = torch.randint(-3, 4, (size, WIDTH + OUTPUTS), generator=generator)
    inputs, factors = rows.to(dtype).split([WIDTH, OUTPUTS], 1)
    return inputs.contiguous(), factors.contiguous()


def images(generator: Generator, size: int) -> Batch:
    return (
        torch.randn(size, 2, WIDTH, WIDTH, generator=generator),
        torch.randn(size, OUTPUTS, generator=generator),
    )


def tokens(generator: Generator, size: int) -> Batch:
    return (
        torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator),
        torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator),
    )


Loss = Callable[[Any, Batch], Tensor]


def linear_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Linear in the output, so that gradients of whole numbers are whole numbers."""
    inputs, factors = batch
    return (model(inputs) * factors).sum()


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
