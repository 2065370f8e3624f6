"""Models for the step and the start, with torch alone. Factories as
:func:`workloads.models.users_subject` wants them: ``gpu_checks.subjects:gpt_large``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.models import TINY, VOCABULARY, Batch, Size, subject

Made = tuple[nn.Module, Callable[[int], Batch]]

SIZES: Final = {
    "large": Size(width=1024, layers=4, rows=8, tokens=512, channels=64),
    "medium": Size(width=512, layers=4, rows=8, tokens=256, channels=32),
    "tiny": TINY,
}
"""In fp32, the large ones have some 230 MB of gradients, and take milliseconds on an H100."""

LARGE_FROM_GIB: Final = 40.0
"""All methods are in memory at a time."""

HEAD_WIDTH: Final = 64


def name_of(kind: str, memory_gib: float, *, is_small: bool) -> str:
    """The factory of a model in the size that a device can hold.

    Args:
        kind: ``"gpt"`` or ``"mlp"``.
        memory_gib: of the device.
        is_small: whether it is only to be seen to work.
    """
    size = "large" if memory_gib >= LARGE_FROM_GIB else "medium"
    return f"{__name__}:{kind}_{'tiny' if is_small else size}"


class Gpt(nn.Module):
    """A decoder of the usual form without dropout; its forward is the loss of a batch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

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


def _gpt(size: Size) -> Made:
    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randint(VOCABULARY, (size.rows, size.tokens), generator=generator),)

    return Gpt(size), batch


def _mlp(size: Size) -> Made:
    made = subject("mlp", size)
    return made.build(), made.batch


gpt_large = functools.partial(_gpt, SIZES["large"])
gpt_medium = functools.partial(_gpt, SIZES["medium"])
gpt_tiny = functools.partial(_gpt, SIZES["tiny"])
mlp_large = functools.partial(_mlp, SIZES["large"])
mlp_medium = functools.partial(_mlp, SIZES["medium"])
mlp_tiny = functools.partial(_mlp, SIZES["tiny"])
