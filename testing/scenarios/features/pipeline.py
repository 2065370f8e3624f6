"""Pipelines whose stages are DDP modules, each over its own group: 2 stages on 2 ranks each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    build_stage,
    pipeline,
)

from testing import models
from testing.scenarios.loop import BySign
from testing.scenarios.run import Run

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
STAGES = 2
MICRO_BATCHES = 4
SIZE = 2 * MICRO_BATCHES


class _Model(nn.Module):
    """Exact. Two layers with a name each, for two stages."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        layers = models.mlp(3, dtype=run.dtype)
        self.first = nn.Sequential(layers[0], layers[1])
        self.second = nn.Sequential(layers[2], layers[3], layers[4])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _loss(output: Tensor, factors: Tensor) -> Tensor:
    return (output * factors).sum()


def _wrap(run: Run, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A stage's module in DDP, compiled in place, because a stage checks whether it is a DDP
    module."""
    ddp = run.ddp(part, process_group=mesh["dp"].get_group())
    if run.is_fused:
        ddp.compile()
    return ddp


def _by_hand(run: Run, mesh: DeviceMesh) -> tuple[Any, nn.Module]:
    index = mesh["pp"].get_local_rank()
    model = _Model(run)
    ddp = _wrap(run, model.first if index == 0 else model.second, mesh)
    width = models.WIDTH if index == 0 else models.OUTPUTS
    inputs, outputs = (
        torch.empty(SIZE // MICRO_BATCHES, columns, dtype=run.dtype, device=run.device)
        for columns in (models.WIDTH, width)
    )
    inputs.requires_grad_(index > 0)
    outputs.requires_grad_()
    # Without given shapes, torch 2.13 infers them with a backward through eager DDP, which fails in
    # the step after that.
    stage = PipelineStage(
        ddp,
        index,
        STAGES,
        run.device,
        input_args=inputs,
        output_args=outputs,
        group=mesh["pp"].get_group(),
    )
    return stage, ddp


def _traced(run: Run, mesh: DeviceMesh) -> tuple[Any, nn.Module]:
    index = mesh["pp"].get_local_rank()
    example = torch.zeros(SIZE // MICRO_BATCHES, models.WIDTH, dtype=run.dtype)
    split = {"second": SplitPoint.BEGINNING}
    pipe = pipeline(_Model(run), mb_args=(example,), split_spec=split)
    part: Any = pipe.get_stage_module(index)
    ddp: Any = _wrap(run, part, mesh)
    ddp.graph = part.graph  # The stage reads it from its module.
    group = mesh["pp"].get_group()
    return build_stage(ddp, index, pipe.info(), run.device, group), ddp


def two_stages(run: Run, schedule: str, *, is_traced: bool = False) -> None:
    """Stages that are made by hand or cut by ``pipeline()``. The first one gets the inputs, and the
    last one the factors of its column's batch."""
    mesh = run.mesh((STAGES, 2), ("pp", "dp"))
    stage, ddp = (_traced if is_traced else _by_hand)(run, mesh)
    runner: Any = SCHEDULES[schedule](stage, n_microbatches=MICRO_BATCHES, loss_fn=_loss)
    optimizer = BySign(ddp.parameters())
    for step in range(3):
        optimizer.zero_grad()
        inputs, factors = run.rows(step, seat=mesh["dp"].get_local_rank(), size=SIZE)
        if stage.is_first:
            runner.step(inputs)
        else:
            runner.step(target=factors)
        run.note_backward(ddp)
        optimizer.step()
    run.note_end(ddp)
