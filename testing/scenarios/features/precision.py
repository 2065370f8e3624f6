"""Smaller dtypes than fp32, the place where gradients are scaled, and the dtype in which they are
sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from testing import models
from testing.models import WIDTH, Batch, Exact, linear_loss
from testing.scenarios.features.comm_hooks import HOOKS, renamed
from testing.scenarios.features.loops import autocast_of
from testing.scenarios.loop import BySign, backwards, train
from testing.scenarios.run import Run


def _of_other_sizes(generator: torch.Generator, size: int) -> Batch:
    """Batches whose gradients have different sizes on each rank: each fits into 8 bits, but no sum
    does. In 16 bits they would be rounded."""
    inputs, factors = models.whole_rows(generator, size)
    return inputs, factors * 2.0 ** (10 * dist.get_rank())


def autocast(run: Run, hook: str = "", **loop: Any) -> None:
    """fp32 parameters under autocast in the run's dtype; with one of :data:`HOOKS`, if any."""
    ddp = run.ddp(models.mlp(2))
    if hook:
        HOOKS[hook](run, ddp)
    train(run, ddp, draw=_of_other_sizes, loss=autocast_of(run), **loop)


def grad_scaler(run: Run, *, infinite_in: int | None = None) -> None:
    """``GradScaler`` in fp32, or under autocast in another dtype; in one step, rank 0's gradients
    may be infinite, which makes all ranks skip it."""
    ddp, forward = run.compiled(models.mlp(2))
    loss = linear_loss if run.dtype == torch.float32 else autocast_of(run)
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
        run.note_values(**{f"scale {step}": scaler.get_scale()})
    run.note_end(ddp)


def double_precision(run: Run) -> None:
    """fp64 parameters."""
    with mock.patch.object(run, "dtype", torch.float64):
        train(run, run.ddp(run.mlp()))


def in_thirds(run: Run) -> None:
    """Division by three, which is inexact in binary: each way of scaling rounds it elsewhere.
    Therefore a single step, in which no gradient of zero gets a sign."""
    ddp, forward = run.compiled(models.mlp())
    backwards(run, ddp, forward, 1)


class _TwoSums(Exact):
    def __init__(self) -> None:
        super().__init__(**{n: nn.Linear(WIDTH, 1, bias=False) for n in ("first", "second")})

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def near_overflow(run: Run) -> None:
    """The sum of two ranks' gradients exceeds fp16's range, but their average does not."""
    ddp = run.ddp(_TwoSums().to(run.dtype))
    inputs = torch.full((4, WIDTH), 10000.0, dtype=run.dtype, device=run.device)

    def step() -> None:
        (ddp(inputs * 2.0**-13).sum() * 2.0**13).backward()

    run.compile(step)()
    run.note_backward(ddp)
    for parameter in ddp.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 40000).all()


def sent_in(run: Run, dtype: str, *, two_dtypes: bool = False, **loop: Any) -> None:
    """``reduce_dtype`` of the flag; eager DDP uses a hook. bf16 has fp32's range, so gradients need
    no scaling before they are sent; fp16 has a smaller range. Gradients of a smaller dtype are sent
    as they are."""

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        is_single = bucket.buffer().dtype == torch.float32
        name = f"{dtype}_compress_hook" if is_single else "allreduce_hook"
        return getattr(default_hooks, name)(state, bucket)

    ddp = run.ddp(models.TwoDtypes() if two_dtypes else models.mlp())
    if not run.is_fused:
        ddp.register_comm_hook(None, renamed(hook))
    train(run, ddp, draw=models.whole_rows, **loop)
