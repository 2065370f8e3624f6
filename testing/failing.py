"""Tensors whose backward fails."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Switch:
    """Whether a backward fails, and how many seconds after it has come there."""

    is_on: bool = False
    seconds: float = 0.0


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str, switch: Switch) -> Tensor:
        ctx.text, ctx.switch = text, switch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.switch.is_on:
            time.sleep(ctx.switch.seconds)
            raise KeyError(ctx.text)
        return gradient, None, None


def failing(x: Tensor, text: str, switch: Switch | None = None) -> Tensor:
    """The same tensor. Its backward raises a ``KeyError`` before it reaches anything behind it, as
    long as ``switch`` is on, or always."""
    apply: Any = torch._dynamo.disable(_Fails.apply)
    result: Tensor = apply(x, text, switch or Switch(is_on=True))
    return result
