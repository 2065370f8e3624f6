"""What blocks are made of: each maps rows of 8 numbers, with a token a row, to such rows.

All blocks have this one shape, so that any of them can follow any other, and compiled kernels are
found again in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

WIDTH = 8
TOKENS = 6

BLOCKS: dict[str, Callable[[], nn.Module]] = {}
"""All blocks by name."""


def block(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Register what makes a block under its name."""
    BLOCKS[make.__name__] = make
    return make


class Plain(nn.Module):
    """A module of rows, seen in another shape inside, such as ``(2, 4)`` for two channels."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner = inner
        self.shape = shape

    def forward(self, x: Tensor, _: Tensor) -> Any:
        if not self.shape:
            return self.inner(x)
        return self.inner(x.reshape(x.shape[0], *self.shape)).reshape(x.shape[0], WIDTH)


class Computed(nn.Module):
    """Modules and parameters, and a function of them, the rows and the tokens."""

    def __init__(
        self, compute: Callable[[Computed, Tensor, Tensor], Any], **parts: nn.Module | Tensor
    ) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        return self.compute(self, x, tokens)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Make a parameter whose rows have about unit length."""
    return nn.Parameter(torch.randn(shape, dtype=dtype) * (shape[-1] if shape else 1) ** -0.5)


def linear(width: int = WIDTH, out: int = WIDTH) -> nn.Linear:
    """Make a linear layer."""
    return nn.Linear(width, out)
