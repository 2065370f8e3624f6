"""Models to measure, and batches for them, in sizes for two cores."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    Attributes:
        build: makes the model. It is trained as ``model(*batch).backward()``: it returns the loss,
            a scalar.
        batch: makes the batch of a seed, which differs between ranks.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


class WithLoss(nn.Module):
    """A model whose forward returns the loss of a batch, a scalar, so that DDP and the compiler see
    all of it."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, batch)


@dataclass(frozen=True)
class Size:
    """Size of the models of a bench.

    Attributes:
        width: width of a transformer's or an MLP's layers.
        layers: number of layers.
        rows: size of a batch: sequences, images or examples.
        tokens: length of a sequence; the edge of an image in pixels is half of it.
        channels: channels of a ResNet's first block, in 64ths of ResNet-50's.
    """

    width: int
    layers: int
    rows: int
    tokens: int
    channels: int


SMALL = Size(width=256, layers=4, rows=4, tokens=128, channels=16)
"""About 17 MB of gradients."""

TINY = Size(width=64, layers=3, rows=2, tokens=32, channels=4)
"""A size that shows that everything runs."""

MEDIUM = Size(width=384, layers=6, rows=2, tokens=128, channels=32)
"""Some 30 to 60 MB of gradients: a few DDP buckets of the default size, which take about as long on
a network of 1 Gbit/s as a step on a core of some 50 GFLOP/s."""

SIZES = {"tiny": TINY, "small": SMALL, "medium": MEDIUM}


def _tokens(size: Size, seed: int) -> Batch:
    shape = (size.rows, size.tokens)
    return (torch.randint(VOCABULARY, shape, generator=_generator(seed)),)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    # Not the model's own loss: GPT-2's warns in the middle of the compiled forward, which splits it
    # in two.
    logits: Tensor = model(input_ids=batch[0]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten())


def _language_model(kind: str, size: Size, **options: Any) -> nn.Module:
    """A transformers model without dropout, whose random numbers would cost the same everywhere and
    make runs differ."""
    import transformers

    options |= {"vocab_size": VOCABULARY, "num_attention_heads": size.width // 64}
    options |= {"hidden_size": size.width, "num_hidden_layers": size.layers}
    config = transformers.AutoConfig.for_model(kind, **options)
    of_kind = (
        transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    )
    model = of_kind.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return WithLoss(model, _language_loss)


def _gpt2(size: Size) -> nn.Module:
    return _language_model("gpt2", size, n_positions=size.tokens, use_cache=False)


class Breaking(nn.Module):
    """A module behind which Dynamo breaks the graph, as at a logger's warning."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = self.module(*inputs, **kwargs)
        torch._dynamo.graph_break()
        return output


def _gpt2_broken(size: Size) -> nn.Module:
    """GPT-2 with a break inside of its last block, four calls deep."""
    model = _gpt2(size)
    blocks: Any = model.get_submodule("model.transformer.h")
    blocks[-1] = Breaking(blocks[-1])
    return model


def _gpt2_broken_twice(size: Size) -> nn.Module:
    """GPT-2 with breaks in two levels: inside of its last block, and between logits and loss."""
    model = _gpt2_broken(size)
    model.add_module("model", Breaking(model.get_submodule("model")))
    return model


def _bert(size: Size) -> nn.Module:
    return _language_model("bert", size, intermediate_size=4 * size.width)


def _llama(size: Size) -> nn.Module:
    inner, heads = size.width * 43 // 16, max(1, size.width // 128)
    options: dict[str, Any] = {"intermediate_size": inner, "num_key_value_heads": heads}
    return _language_model("llama", size, **options, use_cache=False)


class Bottleneck(nn.Module):
    """Block of a ResNet: three convolutions and a shortcut; ``width`` channels times four."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        last = nn.BatchNorm2d(4 * width)
        # With its full initial weight, sixteen blocks on a batch this small would amplify a
        # rounding error to tenths of a gradient, and no two ways could be compared.
        nn.init.constant_(last.weight, 0.1)
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            last,
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def _resnet(size: Size) -> nn.Module:
    """The blocks of ResNet-50, but narrower."""
    first = size.channels
    layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = first
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = first * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and block == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return WithLoss(nn.Sequential(*layers), _square_loss)


def _square_loss(model: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = model(*batch)
    return output.square().mean()


def _images(size: Size, seed: int) -> Batch:
    edge = size.tokens // 2
    return (torch.randn(2 * size.rows, 3, edge, edge, generator=_generator(seed)),)


MLP_SCALE = 3
"""Factor on the width of an MLP compared with a transformer of its size: it has one matrix per
layer, not twelve."""


def _mlp(size: Size) -> nn.Module:
    width = MLP_SCALE * size.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(size.layers)]
    return WithLoss(nn.Sequential(*layers), _square_loss)


def _rows(size: Size, seed: int) -> Batch:
    shape = (size.rows * size.tokens, MLP_SCALE * size.width)
    return (torch.randn(shape, generator=_generator(seed)),)


class Dlrm(nn.Module):
    """Embeddings of categories and an MLP of numbers, their products, and an MLP on top. The
    embeddings' gradients are dense: DDP sends all of them in each step."""

    CATEGORIES = 8
    NUMBERS = 13

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        tables = [nn.Embedding(entries, width) for _ in range(self.CATEGORIES)]
        self.tables = nn.ModuleList(tables)
        self.bottom = nn.Sequential(
            nn.Linear(self.NUMBERS, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()
        )
        features = self.CATEGORIES + 1
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 8 * width)
        )
        self.top.extend([nn.ReLU(), nn.Linear(8 * width, 1)])
        self.pairs: Tensor
        self.register_buffer("pairs", torch.triu_indices(features, features, 1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        chances: Tensor = self.top(torch.cat([dense, pairs], dim=1))
        return chances


def _dlrm(size: Size) -> nn.Module:
    return WithLoss(Dlrm(_entries(size), size.width // 4), _square_loss)


def _entries(size: Size) -> int:
    return size.width * size.layers * 4


def _clicks(size: Size, seed: int) -> Batch:
    rows, generator = size.rows * size.tokens, _generator(seed)
    numbers = torch.randn(rows, Dlrm.NUMBERS, generator=generator)
    shape = (rows, Dlrm.CATEGORIES)
    return numbers, torch.randint(_entries(size), shape, generator=generator)


class ManyParameters(nn.Module):
    """Products with 200 matrices of 8 x 8: a step takes the host's time for parameters, and little
    else."""

    def __init__(self) -> None:
        super().__init__()
        matrices = [nn.Parameter(0.3 * torch.randn(8, 8)) for _ in range(200)]
        self.matrices = nn.ParameterList(matrices)

    def forward(self, rows: Tensor) -> Tensor:
        for matrix in self.matrices:
            rows = torch.tanh(rows @ matrix)
        return rows.square().mean()


def _many_parameters(_: Size) -> nn.Module:
    return ManyParameters()


def _eights(_: Size, seed: int) -> Batch:
    return (torch.randn(8, 8, generator=_generator(seed)),)


MAKERS: dict[str, tuple[Callable[[Size], nn.Module], Callable[[Size, int], Batch]]] = {
    "gpt2": (_gpt2, _tokens),
    "bert": (_bert, _tokens),
    "llama": (_llama, _tokens),
    "mlp": (_mlp, _rows),
    "resnet": (_resnet, _images),
    "dlrm": (_dlrm, _clicks),
}
"""Models that are compiled to one graph."""

SPECIAL: dict[str, tuple[Callable[[Size], nn.Module], Callable[[Size, int], Batch]]] = {
    "gpt2-broken": (_gpt2_broken, _tokens),
    "gpt2-broken-twice": (_gpt2_broken_twice, _tokens),
    "many-parameters": (_many_parameters, _eights),
}
"""Models for one question each: starts with graph breaks, and the host's time for parameters."""


def subject(name: str, size: Size) -> Subject:
    """One of this file's models in a size, or a user's model.

    Args:
        name: one of :data:`MAKERS` or :data:`SPECIAL`, or ``module:factory``: see
            :func:`users_subject`.
        size: size of one of this file's models.

    Raises:
        ValueError: there is no model with that name.
    """
    if ":" in name:
        return users_subject(name)
    makers = MAKERS | SPECIAL
    if name not in makers:
        choices = ", ".join(makers)
        raise ValueError(f"model must be one of {choices}, or module:factory, but is {name!r}.")
    build, batch = makers[name]
    return Subject(functools.partial(build, size), functools.partial(batch, size))


def users_subject(name: str) -> Subject:
    """The model that a user's factory makes.

    Args:
        name: ``module:factory``. ``factory()`` returns ``(model, batch)`` or ``(model, batch,
            loss)``: a module; a function of a seed that makes a batch, a tuple of tensors on the
            CPU; and a function of the model and a batch that makes the loss, a scalar. Without it
            ``model(*batch)`` is the loss. All ranks seed torch alike before they call the factory,
            and give their rank as the seed of their batch.

    Raises:
        ImportError: the module is not there: its directory belongs into ``PYTHONPATH``.
        AttributeError: it has no such function.
        ValueError: the function returns something else.
    """
    factory = pkgutil.resolve_name(name)

    @functools.cache
    def made() -> tuple[nn.Module, Callable[[int], Batch]]:
        parts = factory()
        if not isinstance(parts, tuple) or len(parts) not in (2, 3):
            raise ValueError(f"{name} must return (model, batch) or (model, batch, loss).")
        model, batch, *loss = parts
        return WithLoss(model, *loss) if loss else model, batch

    return Subject(lambda: made()[0], lambda seed: tuple(made()[1](seed)))
