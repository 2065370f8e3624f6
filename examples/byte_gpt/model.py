"""A small GPT over bytes, in plain ``torch.nn``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

BYTES: Final = 256
"""Size of the vocabulary."""


class Block(nn.Module):
    """Pre-norm transformer block: ``float[batch, context, width]`` to the same.

    No linear layer has a bias. The bias of a key has a gradient of exactly zero in theory, so its
    computed gradient is rounding noise, which Adam would scale to full steps.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of attention, then that of the MLP, to ``x``."""
        batch, context, width = x.shape
        joined = self.query_key_value(self.attention_norm(x))
        split = joined.view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
        widened: Tensor = self.mlp_in(self.mlp_norm(x))
        return x.add(self.mlp_out(F.gelu(widened)))


class GPT(nn.Module):
    """Next-byte model; its forward returns the mean cross entropy in nats per byte."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_initialize)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``int64[batch, context]`` twice to a scalar."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, BYTES), targets.view(-1))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
