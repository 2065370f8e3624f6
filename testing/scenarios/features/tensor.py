"""DDP around a tensor-parallel model, on a mesh of 2 x 2 ranks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from testing import models
from testing.models import WIDTH, Batch, fill_whole
from testing.scenarios.loop import sgd, train
from testing.scenarios.run import Run

LENGTH = 4
"""Of a sequence."""


class FeedForward(nn.Module):
    """Exact. Two layers; the hidden one is cut in two, evenly or not."""

    def __init__(self, hidden: int = 2 * WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, WIDTH, dtype=dtype)
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Uneven(nn.Module):
    """Exact. A layer that is not parallel, and a feed-forward that is cut unevenly, and can be
    computed again in the backward."""

    def __init__(self, *, recomputed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.first = fill_whole(nn.Linear(WIDTH, WIDTH, dtype=dtype))
        self.block = FeedForward(2 * WIDTH - 3, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)


class Normed(nn.Module):
    """Rounds. Two feed-forwards, each behind a normalisation that works on a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential()
        for _ in range(2):
            up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            layers = OrderedDict[str, nn.Module](norm=nn.LayerNorm(WIDTH), up=up, down=down)
            self.blocks.append(nn.Sequential(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def columns_and_rows(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """:class:`Uneven`, cut by columns and by rows."""
    # Cut unevenly, the local output would not tell the whole one's size.
    plan = {"block.up": ColwiseParallel(use_local_output=False), "block.down": RowwiseParallel()}
    return parallelize_module(Uneven(**options).to(mesh.device_type), mesh, plan)


def sequences(mesh: DeviceMesh) -> nn.Module:
    """:class:`Normed`, with sequence parallelism between its feed-forwards' layers."""
    plan: dict[str, Any] = {}
    for index in range(2):
        name = f"blocks.{index}"
        plan[name] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)
        )
        plan[f"{name}.norm"] = SequenceParallel()
        plan[f"{name}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{name}.down"] = RowwiseParallel()
    return parallelize_module(Normed().to(mesh.device_type), mesh, plan)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch[0])
    if isinstance(output, DTensor):
        output = output.full_tensor()
    return (output * batch[1]).sum()


def _train(run: Run, build: Callable[[DeviceMesh], nn.Module], **loop: Any) -> None:
    """Ranks of one row of the mesh share a batch. Collectives of tensor parallelism are as many as
    with eager DDP."""
    mesh = run.mesh((2, 2), ("dp", "tp"))
    model, group = run.ddp(build(mesh["tp"]), device_mesh=mesh["dp"]), mesh["dp"].get_group()
    launched: list[int] = []

    def begin(_: int) -> None:
        launched.append(-_launches_beside(group))

    def end() -> None:
        launched[-1] += _launches_beside(group)

    defaults = {"loss": _loss, "draw": functools.partial(_whole, run.dtype)}
    hooks = {"before_step": begin, "before_update": end}
    train(run, model, seat=mesh["dp"].get_local_rank(), **hooks, **{**defaults, **loop})
    run.note("collectives of tensor parallelism", launched)


def _launches_beside(ddps: Any) -> int:
    """On all groups but DDP's: a DTensor may use those of an equal mesh that was there before."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group is not ddps)


def _whole(dtype: torch.dtype, generator: torch.Generator, size: int) -> Batch:
    shape = (2, size, LENGTH, WIDTH)
    inputs, factors = torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return inputs, factors


def uneven(run: Run, *, recomputed: bool = False, **loop: Any) -> None:
    """One layer cut by columns, the next by rows, unevenly; ``recomputed`` in the backward, or not.
    Batches of several sizes give a symbolic one."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return columns_and_rows(mesh, dtype=run.dtype, recomputed=recomputed)

    _train(run, build, **loop)


def compiled_before(run: Run) -> None:
    """The same with DDP around the compiled model: what DDP does to its parameters is not in it."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return run.compile(columns_and_rows(mesh, dtype=run.dtype))

    _train(run, build, style="as it is")


def returning_dtensors(run: Run) -> None:
    """The module returns a DTensor, and batches are of several sizes."""

    def build(mesh: DeviceMesh) -> nn.Module:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
        return parallelize_module(FeedForward(dtype=run.dtype).to(run.device), mesh, plan)

    _train(run, build, steps=2, sizes=(3, 5))


def _real(generator: torch.Generator, size: int) -> Batch:
    shape = (size, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def sequence(run: Run) -> None:
    """Norms work on a part of the sequence; the backward inside of the compiled function."""
    rounding = {"loss": models.square_loss, "draw": _real, "optimizer": sgd(0.1, momentum=0.9)}
    _train(run, sequences, style="inside", **rounding)
