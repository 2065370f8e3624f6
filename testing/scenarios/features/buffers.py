"""Buffers, and how they are kept alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing import models
from testing.scenarios.loop import Loop, OptimizerOf, train
from testing.scenarios.run import Run


class Counting(nn.Module):
    """Exact. A buffer that sums its inputs, which differ on each rank, and is added to the output;
    and one that counts forwards."""

    total: Tensor
    count: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("total", torch.zeros(models.OUTPUTS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        # Added, for no gradient depends on it then: torch's compiled backward computes anew what
        # was read of a buffer that the forward writes, from what was written (torch 2.13 and 2.15,
        # also without DDP).
        out = out + self.total
        with torch.no_grad():
            self.total.add_(x[:, : models.OUTPUTS].sum(0))
            self.count.add_(1)
        return out


def _train_counting(run: Run, loop: Loop | None = None, **options: Any) -> None:
    train(run, run.ddp(Counting(run.mlp()), **options), loop)


def broadcast(run: Run, **loop: Any) -> None:
    """As DDP does it by default: rank 0's, before each forward, but not before one that follows one
    under ``no_sync``."""
    _train_counting(run, Loop(**loop))


def no_forward_sync(run: Run) -> None:
    """``forward_sync_buffers=False``."""
    _train_counting(run, forward_sync_buffers=False)


def no_broadcast(run: Run) -> None:
    """``broadcast_buffers=False``, the older name, which leaves out the first broadcast too."""
    _train_counting(run, broadcast_buffers=False)


class Shifting(nn.Module):
    """Exact. A buffer that is added to the output, and stays."""

    shift: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("shift", torch.ones(models.OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + self.shift
        return out


def broadcast_where_operators_are_called(run: Run) -> None:
    """Inductor lowers none of them, and a buffer is what was broadcast, as the step leaves it."""
    options = {"options": {"fallback_by_default": True}}
    train(run, run.ddp(Shifting(run.mlp())), Loop(style="inside", options=options))


def _average_buffers(group: Any, buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)


def buffer_hook(run: Run) -> None:
    """``_register_buffer_comm_hook``: buffers are summed after each forward."""
    ddp = run.ddp(Counting(run.mlp()))
    ddp._register_buffer_comm_hook(ddp.process_group, _average_buffers)
    train(run, ddp)


class _EagerNorm(nn.BatchNorm1d):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def broadcast_between_forwards(run: Run) -> None:
    """Two forwards before a backward: buffers are broadcast between them, which the first one must
    not mind, whether the layer that has them is compiled or not."""
    for norm in (nn.BatchNorm1d, _EagerNorm):
        torch.manual_seed(0)
        ddp = run.ddp(nn.Sequential(nn.Linear(models.WIDTH, 4, bias=False), norm(4)))
        for call, forward in enumerate((ddp, run.compile(ddp))):
            for step in range(2):
                ddp.zero_grad()
                first, second = (forward(run.rows(step, n, size=5)[0]) for n in range(2))
                (first.exp().sum() + second.exp().sum()).backward()
                run.note_backward(ddp)
                values = dict(ddp.named_buffers()).items()
                label = f"{norm.__name__} {call} {step}"
                run.note_end(nn.Module(), **{f"{label} {name}": b for name, b in values})


def sgd(rate: float, **options: Any) -> OptimizerOf:
    """An optimizer for models that round."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


def batch_norm(run: Run, **loop: Any) -> None:
    """Convolutions with BatchNorm."""
    _train_convolutions(run, models.ConvNet(), **loop)


def _train_convolutions(run: Run, model: nn.Module, **loop: Any) -> None:
    optimizer = sgd(0.1, momentum=0.9)
    rounding = Loop(loss=models.square_loss, draw=models.images, optimizer=optimizer, **loop)
    train(run, run.ddp(model), rounding)


def batch_norm_evaluated(run: Run) -> None:
    """The same with channels last, and statistics that stay."""
    _train_convolutions(run, models.ConvNet(channels_last=True).eval())
