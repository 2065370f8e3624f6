"""A loss whose backward fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str) -> Tensor:
        ctx.text = text
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise KeyError(ctx.text)


def failing(loss: Tensor, text: str) -> Tensor:
    """The same loss. Its backward raises a ``KeyError`` before it reaches anything behind it."""
    apply: Any = torch._dynamo.disable(_Fails.apply)
    result: Tensor = apply(loss, text)
    return result
