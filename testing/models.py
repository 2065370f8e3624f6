"""Tiny models to train, and their data.

Most are *exact*: weights and data are small integers, the loss is linear in the output, and each
parameter moves by one against its gradient's sign, so it stays an integer. No sum or product is
ever rounded, and the order of any summation (by a kernel, by Gloo) does not matter: two ways of
training must agree bitwise. The other models (normalization, softmax) round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
OUTPUTS = 4
VOCABULARY = 64
CONTEXT = 16

Batch = tuple[Tensor, Tensor]


def fill_whole(module: nn.Module, seed: int = 0) -> nn.Module:
    """Set each parameter to integers from -2 to 2, the same on every rank."""
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return module


def mlp(
    depth: int = 3, outputs: int = OUTPUTS, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """An exact model: ``depth`` linear layers with bias."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, outputs)).to(dtype)
    fill_whole(model)
    return model


class Exact(nn.Module):
    """Exact. Linear layers by name: a class gives the number of outputs of each, such as ``class
    Two(Exact, first=WIDTH, last=OUTPUTS)``, and the options that they are made with after it."""

    widths: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init_subclass__(cls, **widths: int) -> None:
        cls.widths = {**cls.widths, **widths}

    def __init__(self, **others: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, width in self.widths.items():
            setattr(self, name, nn.Linear(WIDTH, width))
        for name, value in others.items():
            setattr(self, name, value)
        fill_whole(self)

    if TYPE_CHECKING:  # Some models call a layer, others use its weight.

        def __getattr__(self, name: str) -> Any: ...


class Tied(Exact, first=WIDTH, middle=WIDTH, last=WIDTH):
    """Exact. Two layers share a weight, as an embedding and an output layer often do."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())[:, :OUTPUTS]


class Checkpointed(Exact):
    """Exact. The middle layers are recomputed in the backward; if ``reentrant``, by a nested
    backward inside an autograd node."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__(layers=mlp())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1:4], x, use_reentrant=self.reentrant)
        return self.layers[4](x)


class TwoDtypes(Exact, single=WIDTH, low=WIDTH, single_again=WIDTH, low_again=OUTPUTS):
    """Exact in fp32. In bf16 each gradient is rounded once, whatever the order of the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.low.bfloat16()
        self.low_again.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(self.single(x).relu().bfloat16()).relu()
        return self.low_again(self.single_again(x.float()).bfloat16()).float()


class Layouts(Exact):
    """Exact. Weights that are not contiguous: channels last and transposed."""

    def __init__(self) -> None:
        super().__init__(
            conv=nn.Conv2d(2, WIDTH, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            transposed=nn.Parameter(torch.empty(WIDTH, OUTPUTS).t()),
            permuted=nn.Parameter(torch.empty(3, OUTPUTS, 2).permute(2, 0, 1)),
            plain=nn.Linear(OUTPUTS, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        images = F.pad(x, (0, 24)).reshape(-1, 2, 4, 4)
        features = self.conv(images).sum((2, 3))
        x = self.plain(F.linear(features, self.transposed))
        return x * self.permuted.sum((0, 1))


class Branching(Exact, first=WIDTH, a=WIDTH, b=WIDTH, c=WIDTH):
    """Exact. Runs the requested branches among ``a``, ``b`` and ``c``, which may have different
    dtypes."""

    def __init__(
        self, dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), outputs: int = WIDTH
    ) -> None:
        super().__init__(last=nn.Linear(WIDTH, outputs))
        for name, dtype in dtypes.items():
            getattr(self, name).to(dtype)

    def forward(self, x: Tensor, takes: str) -> Tensor:
        x = self.first(x).relu()
        for name in takes:
            branch = getattr(self, name)
            x = x + branch(x.to(branch.weight.dtype)).sign().to(x.dtype) * branch.weight.sum()
        return self.last(x)


class Shapes(Exact):
    """Exact. A scalar, an empty parameter, and a row."""

    def __init__(self) -> None:
        super().__init__(
            scale=nn.Parameter(torch.empty(())),
            nothing=nn.Parameter(torch.empty(0, OUTPUTS)),
            row=nn.Parameter(torch.empty(1, OUTPUTS)),
            layer=nn.Linear(WIDTH, OUTPUTS),
        )
        fill_whole(self, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.layer(x), self.nothing])
        return x * self.scale + self.row


class Complex(Exact):
    """Exact. Two complex weights and two real ones."""

    def __init__(self) -> None:
        super().__init__(
            first=nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.complex64)),
            second=nn.Parameter(torch.empty(WIDTH, OUTPUTS, dtype=torch.complex64)),
            layer=nn.Linear(WIDTH, WIDTH),
        )
        with torch.no_grad():
            self.first.add_(self.first.conj() * 1j)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.view_as_real(self.layer(x).to(torch.complex64) @ self.first @ self.second)
        return out[..., 0] + 2 * out[..., 1]


class ConvNet(nn.Module):
    """Rounds. Convolutions and BatchNorm; ``channels_last`` for its weights.

    The convolutions have no bias: BatchNorm subtracts it again, so its gradient would consist of
    rounding errors only, which differ between kernels.
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
    """Rounds. Layers of GPT-2 with its tied embedding, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 32, "n_head": 2}
    options: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, **size | options))


def whole_rows(generator: Generator, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of integers, and the factor of each output in the loss."""
    rows = torch.randint(-3, 4, (size, WIDTH + OUTPUTS), generator=generator)
    inputs, factors = rows.to(dtype).split([WIDTH, OUTPUTS], 1)
    return inputs.contiguous(), factors.contiguous()


def images(generator: Generator, size: int) -> Batch:
    inputs = torch.randn(size, 2, WIDTH, WIDTH, generator=generator)
    return inputs, torch.randn(size, OUTPUTS, generator=generator)


def tokens(generator: Generator, size: int) -> Batch:
    inputs, targets = torch.randint(0, VOCABULARY, (2, size, CONTEXT), generator=generator)
    return inputs, targets


Loss = Callable[..., Tensor]


def linear_loss(model: Any, batch: Batch, *takes: Any) -> Tensor:
    """A loss that is linear in the output, so that gradients of integers are integers. ``takes``:
    the branches that a model with branches runs."""
    inputs, factors = batch
    return (model(inputs, *takes) * factors).sum()


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Average(torch.autograd.Function):
    """The average over the ranks of a group: a collective in the forward, and one in the backward,
    as in ``SyncBatchNorm`` on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _averaged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _averaged(grad, ctx.group), None


def _averaged(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out / dist.get_world_size()
