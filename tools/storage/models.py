"""Models to measure, small enough for two cores, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096
TOKENS = (4, 128)
"""Sequences of a batch, and their length."""


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    Attributes:
        build: makes the model.
        loss: of the model, wrapped or not, and a batch.
        batch: makes one.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    batch: Callable[[], Tensor]


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))


def _language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=256, n_layer=4, n_head=4, use_cache=False
    )
    return _without_dropout(transformers.GPT2LMHeadModel(config))


def _bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    return _without_dropout(transformers.BertForMaskedLM(config))


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return _without_dropout(transformers.LlamaForCausalLM(config))


def _without_dropout(model: Any) -> nn.Module:
    """Its random numbers would cost the same everywhere, and make runs differ."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain: nn.Module = model
    return plain


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def _resnet() -> nn.Module:
    """The blocks of ResNet-50, a quarter as wide."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 16
    for width, blocks, stride in ((16, 3, 1), (32, 4, 2), (64, 6, 2), (128, 3, 2)):
        for block in range(blocks):
            layers.append(_Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def _square_loss(model: nn.Module, images: Tensor) -> Tensor:
    output: Tensor = model(images)
    return output.square().mean()


def _images() -> Tensor:
    return torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))


SUBJECTS = {
    "GPT-2": Subject(_gpt2, _language_loss, _tokens),
    "BERT": Subject(_bert, _language_loss, _tokens),
    "Llama": Subject(_llama, _language_loss, _tokens),
    "ResNet-50": Subject(_resnet, _square_loss, _images),
}
