"""Unusual parameters, and models that change."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from testing import models
from testing.models import Batch, linear_loss
from testing.scenarios.features.buffers import sgd
from testing.scenarios.loop import Loop, train
from testing.scenarios.run import Run


def layouts(run: Run, **loop: Any) -> None:
    """Weights that are not contiguous; gradients must have their strides."""
    train(run, run.ddp(models.Layouts()), Loop(**loop))


def scalars(run: Run) -> None:
    """A scalar and an empty parameter."""
    train(run, run.ddp(models.Shapes()))


def complex_numbers(run: Run) -> None:
    """Complex parameters beside real ones."""
    train(run, run.ddp(models.Complex()))


def complex_that_stay(run: Run) -> None:
    """Complex gradients are there while something is compiled, and an eager forward has saved
    complex tensors: Dynamo makes fake tensors of both."""
    ddp = run.ddp(models.Complex())
    for number, forward in enumerate((run.compile(ddp), ddp)):
        for step in range(2):
            linear_loss(forward, run.rows(step)).backward()
            run.note_backward(ddp)
            with torch.no_grad():
                outputs = forward(run.rows(step)[0])
            run.note_end(nn.Module(), **{f"outputs {number} {step}": outputs})


class _Checkpointed(nn.Module):
    """Exact. All but the last layer are computed again, by a backward in the backward."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.inner, self.last = run.mlp(2, models.WIDTH), run.mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))


def reentrant_checkpointing(run: Run) -> None:
    """Gradients are kept, and batch sizes change: their sizes become symbols. Compiled, a
    checkpoint is none of its own; in an eager forward its backward runs inside of another."""
    ddp = run.ddp(_Checkpointed(run))
    for forward in (run.compile(ddp), ddp):
        for step in range(3):
            ddp.zero_grad(set_to_none=False)
            linear_loss(forward, run.rows(step, size=3 + step)).backward()
            run.note_backward(ddp)


class _Upsampled(nn.Module):
    """Exact. The backward of its middle takes no symbolic sizes."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.last = run.mlp(1, models.WIDTH // 2), run.mlp(1)
        self.middle = nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x).unsqueeze(1)).squeeze(1))
        return out


def upsampled(run: Run) -> None:
    """An eager forward with several batch sizes: from the second on, the trace has symbols."""
    ddp = run.ddp(_Upsampled(run))
    for step in range(4):
        ddp.zero_grad()
        linear_loss(ddp, run.rows(step, size=3 + step + dist.get_rank())).backward()
        run.note_backward(ddp)


def recompiled(run: Run) -> None:
    """The model computes something else from the third step on."""
    model = models.Switched()

    def switch(step: int) -> None:
        model.negative = step >= 2

    train(run, run.ddp(model), Loop(steps=4, before_step=switch))


def transformer(run: Run, **loop: Any) -> None:
    """A layer of GPT-2."""
    optimizer = sgd(0.1, momentum=0.9)
    rounding = Loop(loss=models.language_loss, draw=models.tokens, optimizer=optimizer, **loop)
    train(run, run.ddp(models.gpt2(layers=1)), rounding)


def marked_dynamic(run: Run, **loop: Any) -> None:
    """``mark_dynamic`` on the batch, which allows no compile to fix its size."""

    def draw(generator: torch.Generator, size: int) -> Batch:
        batch = models.whole_rows(generator, size)
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 0)
        return batch

    train(run, run.ddp(run.mlp()), Loop(steps=4, sizes=(2, 4, 3, 5), draw=draw, **loop))
