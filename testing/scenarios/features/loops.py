"""Ways to write a training loop, and what of it is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from testing import models
from testing.models import Batch, linear_loss
from testing.scenarios.loop import BySign, Loop, train
from testing.scenarios.run import Run, synced_if


def plain(run: Run, **loop: Any) -> None:
    """One forward, one backward, one step; the backward outside of the compiled model, if ``loop``
    says nothing else."""
    train(run, run.ddp(run.mlp()), Loop(**loop))


def several_forwards(run: Run) -> None:
    """One backward through two forwards of the same module."""
    train(run, run.ddp(run.mlp()), Loop(loss=_loss_of_halves))


def _loss_of_halves(model: nn.Module, batch: Batch) -> Tensor:
    inputs, factors = batch
    return linear_loss(model, (inputs[:2], factors[:2])) + linear_loss(
        model, (inputs[2:], factors[2:])
    )


def forwards_then_backwards(run: Run) -> None:
    """Two forwards, and then the backward of each; the first under ``no_sync``, as a schedule of
    micro-batches does it."""
    ddp = run.ddp(run.mlp())
    forward = run.compile(ddp)
    optimizer = BySign(ddp.parameters())
    for step in range(3):
        optimizer.zero_grad()
        with synced_if(ddp, False):
            first = linear_loss(forward, run.rows(step, 0))
        second = linear_loss(forward, run.rows(step, 1))
        with synced_if(ddp, False):
            first.backward()
        run.note_backward(ddp, synced=False)
        second.backward()
        run.note_backward(ddp)
        optimizer.step()
    run.note_end(ddp)


def evaluation_between(run: Run) -> None:
    """Forwards without gradients between the steps."""
    ddp = run.ddp(run.mlp())

    def evaluate(step: int) -> None:
        ddp.eval()
        with torch.no_grad():
            run.note_end(ddp, **{f"evaluated {step}": linear_loss(ddp, run.rows(step, 7))})
        ddp.train()

    train(run, ddp, Loop(before_step=evaluate))


class _Broken(nn.Module):
    """A graph break in the middle of its forward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        middle = len(self.layers) // 2
        x = self.layers[:middle](x)
        torch._dynamo.graph_break()
        out: Tensor = self.layers[middle:](x)
        return out


def graph_break(run: Run) -> None:
    """A graph break in the model; the backward outside."""
    train(run, run.ddp(_Broken(run.mlp())))


def graph_break_inside(run: Run) -> None:
    """A graph break in a compiled step between the forward and the backward."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = linear_loss(model, batch)
        torch._dynamo.graph_break()
        return value

    train(run, run.ddp(run.mlp()), Loop(style="inside", loss=loss))


def partly_compiled(run: Run) -> None:
    """Only one layer of the model is compiled."""
    model = run.mlp()
    model[2] = run.compile(model[2])
    train(run, run.ddp(model), Loop(style="as it is"))


def compiled_before_ddp(run: Run) -> None:
    """``DistributedDataParallel(torch.compile(model))``."""
    train(run, run.ddp(run.compile(run.mlp())), Loop(style="as it is"))


class _Disabled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def compiler_disable(run: Run) -> None:
    """``torch.compiler.disable`` on the forward of one layer."""
    model = run.mlp()
    model[2] = _Disabled(model[2])
    train(run, run.ddp(model))


def reduce_overhead(run: Run) -> None:
    """``torch.compile(mode="reduce-overhead")``."""
    train(run, run.ddp(run.mlp()), Loop(options={"mode": "reduce-overhead"}))


def dynamic(run: Run) -> None:
    """``torch.compile(dynamic=True)``, and batches of several sizes."""
    loop = Loop(options={"dynamic": True}, steps=4, sizes=(2, 4, 3, 5))
    train(run, run.ddp(run.mlp()), loop)


def checkpointing(run: Run, **loop: Any) -> None:
    """Activation checkpointing."""
    train(run, run.ddp(models.Checkpointed()), Loop(**loop))
