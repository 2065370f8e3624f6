"""Models for steps and starts that need only torch. Factories for
:func:`workloads.models.users_subject`: ``gpu_checks.subjects:gpt2``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.models import TINY, VOCABULARY, Batch, Size, WithLoss, subject

Made = tuple[nn.Module, Callable[[int], Batch]]

GPT2: Final = Size(width=768, layers=12, rows=8, tokens=1024, channels=0)
GPT2_VOCABULARY: Final = 50257
SMALL: Final = Size(width=256, layers=2, rows=8, tokens=256, channels=0)
"""A model that starts quickly, and whose steps wait for the host."""

RESNET50: Final = Size(width=0, layers=0, rows=32, tokens=448, channels=64)
"""Size for :func:`workloads.models.subject`: 64 images of 224 pixels."""

HEAD_WIDTH: Final = 64


class Gpt(nn.Module):
    """A decoder of the usual form without dropout; its head shares the embedding's weight, and its
    forward returns the loss of a batch."""

    def __init__(self, size: Size, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.places = nn.Embedding(size.tokens, size.width)
        block = nn.TransformerEncoderLayer(
            size.width,
            max(1, size.width // HEAD_WIDTH),
            4 * size.width,
            dropout=0.0,
            activation=F.gelu,
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(size.width)
        self.blocks = nn.TransformerEncoder(block, size.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        # As in GPT-2: the embedding's default initialization would make logits of hundreds.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.places(places)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), places.device)
        logits = self.head(self.blocks(hidden, mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    """The loss under bf16 autocast; parameters stay fp32."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        loss: Tensor = model(*batch)
    return loss


def _gpt(size: Size, vocabulary: int = VOCABULARY) -> Made:
    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(vocabulary, (size.rows, size.tokens), generator=generator),)

    return WithLoss(Gpt(size, vocabulary), _under_autocast), batch


def _resnet(size: Size) -> Made:
    made = subject("resnet", size)
    model = made.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(seed: int) -> Batch:
        (images,) = made.batch(seed)
        return (images.contiguous(memory_format=torch.channels_last),)

    return WithLoss(model, _under_autocast), batch


def gpt2() -> Made:
    """GPT-2 of 124 million parameters, 8 x 1024 tokens."""
    return _gpt(GPT2, GPT2_VOCABULARY)


def gpt() -> Made:
    """A small GPT."""
    return _gpt(SMALL)


def tiny_gpt() -> Made:
    """A tiny GPT, to see that everything runs."""
    return _gpt(replace(TINY, layers=1))


def resnet50() -> Made:
    """ResNet-50, a batch of 64, channels last."""
    return _resnet(RESNET50)


def tiny_resnet() -> Made:
    """A tiny ResNet, to see that everything runs."""
    return _resnet(TINY)
