"""Smaller dtypes beside fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from testing import models
from testing.models import Batch, linear_loss
from testing.scenarios.loop import BySign, Loop, train
from testing.scenarios.run import Run


def mixed_precision(run: Run) -> None:
    """DDP's ``mixed_precision`` with parameters, reductions and buffers in the cell's dtype."""
    low = run.dtype
    precision = _MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    ddp = run.ddp(models.mlp(2), mixed_precision=precision)
    train(run, ddp, Loop(draw=models.whole_rows, loss=_loss_in_single))


def _loss_in_single(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0]).float() * batch[1]).sum()
    return loss


def autocast_of(run: Run) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss under autocast in the cell's dtype."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(run.device.type, dtype=run.dtype):
            outputs: Tensor = model(batch[0])
        return (outputs.float() * batch[1]).sum()

    return loss


def autocast(run: Run) -> None:
    """fp32 parameters under autocast in the cell's dtype."""
    train(run, run.ddp(models.mlp()), Loop(draw=models.whole_rows, loss=autocast_of(run)))


def autocast_inside(run: Run) -> None:
    """The same with the backward inside of the compiled function."""
    loop = Loop(style="inside", draw=models.whole_rows, loss=autocast_of(run))
    train(run, run.ddp(models.mlp()), loop)


def _train_scaled(run: Run, loss: Any, infinite_in: int | None = None, **options: Any) -> None:
    """Train with ``GradScaler``; rank 0's loss is infinite in one step if that is given."""
    ddp = run.ddp(models.mlp(2), **options)
    forward = run.compile(ddp)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=8.0, growth_interval=2)
    optimizer = BySign(ddp.parameters())
    for step in range(4):
        optimizer.zero_grad()
        batch = run.drawn(models.whole_rows, step)
        value = scaler.scale(loss(forward, batch))
        if step == infinite_in and dist.get_rank() == 0:
            value = value * float("inf")
        value.backward()
        run.note_backward(ddp)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 2.0**20)
        scaler.step(optimizer)
        scaler.update()
        run.note_end(nn.Module(), **{f"scale {step}": scaler.get_scale()})
    run.note_end(ddp)


def grad_scaler(run: Run) -> None:
    """``GradScaler``, in fp32."""
    _train_scaled(run, linear_loss)


def grad_scaler_infinite(run: Run) -> None:
    """``GradScaler`` with a step that one rank's infinite gradients make all ranks skip."""
    _train_scaled(run, linear_loss, infinite_in=1)


def grad_scaler_autocast(run: Run) -> None:
    """``GradScaler`` and autocast in the cell's dtype, with a step that is skipped."""
    _train_scaled(run, autocast_of(run), infinite_in=1)


def two_dtypes(run: Run) -> None:
    """fp32 and bf16 parameters in one module."""
    train(run, run.ddp(models.TwoDtypes()), Loop(draw=models.whole_rows))


def double_precision(run: Run) -> None:
    """fp64 parameters."""
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, run, "dtype", run.dtype)
        run.dtype = torch.float64
        train(run, run.ddp(models.mlp(3, dtype=torch.float64)))
