"""Smaller dtypes beside fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from testing import models
from testing.models import Batch, linear_loss
from testing.scenarios.features.hooks import renamed
from testing.scenarios.loop import BySign, Loop, backwards, train
from testing.scenarios.run import Run


def mixed_precision(run: Run) -> None:
    """DDP's ``mixed_precision`` with parameters, reductions and buffers in the run's dtype."""
    low = run.dtype
    precision = _MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low)
    ddp = run.ddp(models.mlp(2), mixed_precision=precision)
    train(run, ddp, Loop(draw=models.whole_rows, loss=_loss_in_single))


def _loss_in_single(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0]).float() * batch[1]).sum()
    return loss


def autocast_of(run: Run) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss under autocast in the run's dtype."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(run.device.type, dtype=run.dtype):
            outputs: Tensor = model(batch[0])
        return (outputs.float() * batch[1]).sum()

    return loss


def autocast(run: Run, **loop: Any) -> None:
    """fp32 parameters under autocast in the run's dtype."""
    low = Loop(draw=models.whole_rows, loss=autocast_of(run), **loop)
    train(run, run.ddp(models.mlp()), low)


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
    """``GradScaler`` and autocast in the run's dtype, with a step that is skipped."""
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


# Where gradients are scaled, and in which dtype they are sent


def scaled(run: Run, **loop: Any) -> None:
    """As the option ``scaling`` says."""
    train(run, run.ddp(models.mlp()), Loop(**loop))


def in_thirds(run: Run) -> None:
    """One over three has no end in binary: each way of scaling rounds it in another place. So
    there is one step, in which no gradient of zero gets a sign."""
    ddp = run.ddp(models.mlp())
    backwards(run, ddp, run.compile(ddp), 1)


class _TwoSums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(models.WIDTH, 1, bias=False) for _ in range(2))
        models.fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + self.second(x)
        return out


def near_overflow(run: Run) -> None:
    """The sum of two ranks' gradients is beyond fp16's range, their average is not."""
    ddp = run.ddp(_TwoSums().to(run.dtype))
    inputs = torch.full((4, models.WIDTH), 10000.0, dtype=run.dtype, device=run.device)

    def step() -> None:
        (ddp(inputs * 2.0**-13).sum() * 2.0**13).backward()

    run.compile(step)()
    run.note_backward(ddp)
    for parameter in ddp.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 40000).all()


def _train_sending(run: Run, hook: Any, model: nn.Module, **loop: Any) -> None:
    """Plain DDP under the flag, whose option says what is sent; with a hook in eager."""
    ddp = run.ddp(model)
    if not run.is_fused:
        ddp.register_comm_hook(None, renamed(hook))
    train(run, ddp, Loop(draw=models.whole_rows, **loop))


def sent_in(run: Run, dtype: str, **loop: Any) -> None:
    """``reduce_dtype``. bf16 has fp32's range, and what is sent needs no scaling before; fp16 has a
    smaller one."""
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    _train_sending(run, hooks[dtype], models.mlp(), **loop)


def _compress_single(state: Any, bucket: dist.GradBucket) -> Any:
    is_single = bucket.buffer().dtype == torch.float32
    hook = default_hooks.fp16_compress_hook if is_single else default_hooks.allreduce_hook
    return hook(state, bucket)


def small_already(run: Run) -> None:
    """``reduce_dtype`` for fp32 and bf16 parameters: what is small is sent as it is."""
    _train_sending(run, _compress_single, models.TwoDtypes())
