"""Models for steps and starts, with torch alone. Factories as
:func:`workloads.models.users_subject` wants them: ``gpu_checks.subjects:gpt2``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.models import TINY, VOCABULARY, Batch, Size, subject

Made = tuple[nn.Module, Callable[[int], Batch]]

GPT2: Final = Size(width=768, layers=12, rows=8, tokens=1024, channels=0)
GPT2_VOCABULARY: Final = 50257
SMALL: Final = Size(width=256, layers=2, rows=8, tokens=256, channels=0)
"""What starts soon, and whose steps wait for the host."""

RESNET50: Final = Size(width=0, layers=0, rows=32, tokens=448, channels=64)
"""Of :func:`workloads.models.subject`: 64 images of 224 pixels."""

HEAD_WIDTH: Final = 64


class Gpt(nn.Module):
    """A decoder of the usual form without dropout, whose head is its embedding; its forward is the
    loss of a batch."""

    def __init__(self, size: Size, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.places = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        # As GPT-2's: the embedding's own start would make logits of hundreds.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.places(places))
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Block(nn.Module):
    """Attention and an MLP, each beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        inner: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + inner


class Autocast(nn.Module):
    """A model under bf16 autocast; its parameters stay fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss: Tensor = self.model(*batch)
        return loss


def _gpt(size: Size, vocabulary: int = VOCABULARY) -> Made:
    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(vocabulary, (size.rows, size.tokens), generator=generator),)

    return Autocast(Gpt(size, vocabulary)), batch


def _resnet(size: Size) -> Made:
    made = subject("resnet", size)
    model = made.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(seed: int) -> Batch:
        (images,) = made.batch(seed)
        return (images.contiguous(memory_format=torch.channels_last),)

    return Autocast(model), batch


def gpt2() -> Made:
    """GPT-2 of 124 million parameters, 8 x 1024 tokens."""
    return _gpt(GPT2, GPT2_VOCABULARY)


def gpt() -> Made:
    """A small one."""
    return _gpt(SMALL)


def tiny_gpt() -> Made:
    """To see that everything runs."""
    return _gpt(replace(TINY, layers=1))


def resnet50() -> Made:
    """ResNet-50, a batch of 64, channels last."""
    return _resnet(RESNET50)


def tiny_resnet() -> Made:
    """To see that everything runs."""
    return _resnet(TINY)
