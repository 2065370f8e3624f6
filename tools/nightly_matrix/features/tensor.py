"""DDP around a tensor-parallel model, on a mesh of 2 x 2 ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nightly_matrix.features.buffers import sgd
from nightly_matrix.run import Run, synced_if
from nightly_matrix.training import BySign, Loop, OptimizerOf, backward_of
from testing import models
from testing.models import Batch

LENGTH = 4


def _train(
    run: Run,
    model: nn.Module,
    mesh: DeviceMesh,
    loop: Loop,
    optimizer_of: OptimizerOf = BySign,
) -> None:
    """Ranks of one row of the mesh share a batch."""
    backward = backward_of(run, model, loop)
    optimizer = optimizer_of(model.parameters())
    for step in range(loop.steps):
        optimizer.zero_grad()
        for micro in range(loop.micro_batches):
            synced = not loop.no_sync or micro == loop.micro_batches - 1
            with synced_if(model, synced):
                draw = loop.draw
                seat = mesh["dp"].get_local_rank()
                if draw is None:
                    batch = run.rows(step, micro, seat=seat)
                else:
                    batch = run.drawn(draw, step, micro, seat=seat)
                backward(batch)
            run.note_backward(model, synced=synced)
        optimizer.step()
    run.note_end(model)


def _colwise_rowwise(run: Run, loop: Loop, *, compiled_before: bool = False) -> None:
    mesh = run.mesh((2, 2), ("dp", "tp"))
    model: nn.Module = run.mlp().to(run.device)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if compiled_before:
        model = run.compile(model)
    _train(run, run.ddp(model, device_mesh=mesh["dp"]), mesh, loop)


def colwise_rowwise(run: Run) -> None:
    """One layer cut by columns, the next by rows."""
    _colwise_rowwise(run, Loop())


def colwise_rowwise_inside(run: Run) -> None:
    """The same with the backward inside of the compiled function."""
    _colwise_rowwise(run, Loop(style="inside"))


def colwise_rowwise_eager_forward(run: Run) -> None:
    """The same with nothing compiled but the backward."""
    _colwise_rowwise(run, Loop(style="as it is"))


def colwise_rowwise_compiled_before(run: Run) -> None:
    """The same with DDP around the compiled model: what DDP does to its parameters is not in it."""
    _colwise_rowwise(run, Loop(style="as it is"), compiled_before=True)


def colwise_rowwise_no_sync(run: Run) -> None:
    """The same with accumulation."""
    _colwise_rowwise(run, Loop(steps=2, micro_batches=2, no_sync=True))


class _Block(nn.Module):
    """Rounds. A norm in front of two layers, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(models.WIDTH)
        self.up = nn.Linear(models.WIDTH, 2 * models.WIDTH)
        self.down = nn.Linear(2 * models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)).relu())
        return out


def _sequences(generator: torch.Generator, size: int) -> Batch:
    shape = (size, LENGTH, models.WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def sequence_parallel(run: Run) -> None:
    """The norm works on a part of the sequence."""
    mesh = run.mesh((2, 2), ("dp", "tp"))
    model = _Block().to(run.device)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    split = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    parallelize_module(model, mesh["tp"], split)
    ddp = run.ddp(model, device_mesh=mesh["dp"])
    loop = Loop(loss=models.square_loss, draw=_sequences)
    _train(run, ddp, mesh, loop, sgd(0.1))
