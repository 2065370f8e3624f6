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
"""Length of a sequence."""


class FeedForward(nn.Module):
    """Exact. Two layers; the hidden dimension is split in two, evenly or unevenly."""

    def __init__(self, hidden: int = 2 * WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, WIDTH, dtype=dtype)
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Uneven(nn.Module):
    """Exact. A layer that is not parallel, and a feed-forward that is split unevenly, and can be
    recomputed in the backward."""

    def __init__(self, *, recomputed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.first = fill_whole(nn.Linear(WIDTH, WIDTH, dtype=dtype))
        self.block = FeedForward(2 * WIDTH - 3, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)


class Normed(nn.Module):
    """Rounds. Two feed-forwards, each after a normalization that works on a part of a sequence."""

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
    """:class:`Uneven`, split by columns and by rows."""
    # With an uneven split, the local output does not tell the size of the whole one.
    plan = {"block.up": ColwiseParallel(use_local_output=False), "block.down": RowwiseParallel()}
    return parallelize_module(Uneven(**options).to(mesh.device_type), mesh, plan)


def sequences(mesh: DeviceMesh) -> nn.Module:
    """:class:`Normed`, with sequence parallelism between the layers of its feed-forwards."""
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
    """Train; ranks of one row of the mesh share a batch. The number of collectives of tensor
    parallelism equals that of eager DDP."""
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
    """Number of launches on all groups except DDP's: a DTensor may use the groups of an equal mesh
    that existed before."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups if group is not ddps)


def _whole(dtype: torch.dtype, generator: torch.Generator, size: int) -> Batch:
    shape = (2, size, LENGTH, WIDTH)
    inputs, factors = torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return inputs, factors


def uneven(run: Run, *, recomputed: bool = False, **loop: Any) -> None:
    """One layer split by columns, the next by rows, unevenly; optionally ``recomputed`` in the
    backward. Batches of several sizes give a symbolic size."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return columns_and_rows(mesh, dtype=run.dtype, recomputed=recomputed)

    _train(run, build, **loop)


def compiled_before(run: Run) -> None:
    """:func:`uneven` with DDP around the compiled model: the compiled code does not contain DDP's
    changes to its parameters."""

    def build(mesh: DeviceMesh) -> nn.Module:
        return run.compile(columns_and_rows(mesh, dtype=run.dtype))

    _train(run, build, style="as it is")


def returning_dtensors(run: Run) -> None:
    """The module returns a DTensor, and batches have several sizes."""

    def build(mesh: DeviceMesh) -> nn.Module:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
        return parallelize_module(FeedForward(dtype=run.dtype).to(run.device), mesh, plan)

    _train(run, build, steps=2, sizes=(3, 5))


def _real(generator: torch.Generator, size: int) -> Batch:
    shape = (size, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def sequence(run: Run) -> None:
    """Norms work on a part of the sequence; the backward is inside of the compiled function."""
    rounding = {"loss": models.square_loss, "draw": _real, "optimizer": sgd(0.1, momentum=0.9)}
    _train(run, sequences, style="inside", **rounding)
