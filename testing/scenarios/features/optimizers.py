"""Optimizers that run in the backward, and those that work on many gradients at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from testing.scenarios.loop import Loop, OptimizerOf, train
from testing.scenarios.run import Run


def in_backward(run: Run) -> None:
    """``_apply_optimizer_in_backward``, before DDP is constructed."""
    model = run.mlp().to(run.device)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    train(run, run.ddp(model), Loop(optimizer=_nothing))


def fused_in_hook(run: Run) -> None:
    """``_register_fused_optim``: a step for each bucket as it is averaged."""
    ddp = run.ddp(run.mlp())
    ddp._register_fused_optim(torch.optim.SGD, lr=1.0)
    train(run, ddp, Loop(optimizer=_nothing))


class _Nothing(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None


def _nothing(parameters: Any) -> torch.optim.Optimizer:
    return _Nothing(parameters, {})


def _clipping(optimizer: OptimizerOf, run: Run, *, foreach: bool, style: Any = "outside") -> None:
    ddp = run.ddp(run.mlp())

    def clip() -> None:
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0, foreach=foreach)

    train(run, ddp, Loop(style=style, optimizer=optimizer, before_update=clip))


def fused(run: Run) -> None:
    """``AdamW(fused=True)`` behind ``clip_grad_norm_``."""
    _clipping(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), run, foreach=False)


def foreach(run: Run) -> None:
    """``AdamW(foreach=True)`` behind ``clip_grad_norm_(foreach=True)``."""
    _clipping(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True), run, foreach=True)


def foreach_momentum(run: Run) -> None:
    """``SGD(foreach=True)`` with momentum, the backward inside of the compiled function."""
    _clipping(
        lambda p: torch.optim.SGD(p, lr=2**-6, momentum=0.5, foreach=True),
        run,
        foreach=True,
        style="inside",
    )


def compiled_step(run: Run) -> None:
    """The optimizer's step is compiled too."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        step: Any = run.compile(optimizer.step)
        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    train(run, run.ddp(run.mlp()), Loop(optimizer=make))
