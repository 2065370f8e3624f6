"""Trains tensor-parallel models in DDP on a mesh of 2 x 2 ranks: a job for
:class:`testing.processes.RankPool`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo
import torch._inductor.config
from torch import Generator, Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from testing.models import WIDTH, fill_whole
from testing.training import BackwardRecord, BySign, Record, noted_warnings

LENGTH = 4
"""Of a sequence."""

Style = Literal["inside", "outside", "eager forward"]


class FeedForward(nn.Module):
    """Exact. Two layers; the hidden one is cut in two, evenly or not."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class TwoBlocks(nn.Module):
    """Exact. A layer that is not parallel, and two feed-forwards; the second can be computed again
    in the backward."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.first = fill_whole(nn.Linear(WIDTH, WIDTH))
        self.even = FeedForward()
        self.uneven = FeedForward(2 * WIDTH - 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.even(self.first(x))
        if self.recomputed:
            return checkpoint(self.uneven, x, use_reentrant=False)
        return self.uneven(x)


class Normed(nn.Module):
    """Rounds. Two feed-forwards, each behind a normalisation that works on a part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential()
        for _ in range(2):
            block = nn.Sequential()
            block.add_module("norm", nn.LayerNorm(WIDTH))
            block.add_module("up", nn.Linear(WIDTH, 2 * WIDTH))
            block.add_module("down", nn.Linear(2 * WIDTH, WIDTH))
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def columns_and_rows(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """:class:`TwoBlocks`, cut by columns and by rows."""
    plan: dict[str, Any] = {}
    for name in ("even", "uneven"):
        # Cut unevenly, the local output would not tell the whole one's size.
        plan[f"{name}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"{name}.down"] = RowwiseParallel()
    return parallelize_module(TwoBlocks(**options), mesh, plan)


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
    return parallelize_module(Normed(), mesh, plan)


def returning_dtensors(mesh: DeviceMesh) -> nn.Module:
    """:class:`FeedForward`, returning a DTensor."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    return parallelize_module(FeedForward(), mesh, plan)


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
        build: makes the model on the tensor-parallel mesh; called with ``options``.
        style: the backward inside of a compiled step, outside of a compiled model, or behind an
            eager forward.
        batch_sizes: of the steps, one each.
        learning_rate: of SGD with momentum; ``None`` for exact models, whose parameters move by one
            against the gradient's sign.
        options: of the model.
    """

    build: Callable[..., nn.Module]
    style: Style
    batch_sizes: tuple[int, ...] = (3, 3, 3)
    learning_rate: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TensorParallelRecord(Record):
    """One run on one rank.

    Attributes:
        launches_of_tp: what the tensor-parallel group was given, a number a step.
    """

    launches_of_tp: list[int] = field(default_factory=list)


def train_on_mesh(job: Job, flag: str) -> tuple[TensorParallelRecord, TensorParallelRecord]:
    """Trains under the flag, and by eager DDP, from the same start on the same data."""
    import fusion_passes
    from fusion_passes.state import process_state

    process_state.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = len(fusion_passes.reports())
    with (
        torch._inductor.config.patch(ddp_fusion=flag),
        noted_warnings(fusion_passes.FusionWarning) as texts,
    ):
        fused = _train(job, mesh, job.style)
    fused.reports = list(fusion_passes.reports()[before:])
    fused.warnings = texts
    return fused, _train(job, mesh, "eager forward")


def _train(job: Job, mesh: DeviceMesh, style: Style) -> TensorParallelRecord:
    torch._dynamo.reset()
    ddp = DistributedDataParallel(job.build(mesh["tp"], **job.options), device_mesh=mesh["dp"])
    # Eager DDP's parameters are lost to the module in the first forward.
    parameters = dict(ddp.named_parameters())
    optimizer = _optimizer(job, list(parameters.values()))
    backward = _backward_of(ddp, style)
    groups = [mesh["dp"].get_group(), mesh["tp"].get_group()]
    record = TensorParallelRecord([], {}, {}, [], [])
    for step, size in enumerate(job.batch_sizes):
        optimizer.zero_grad()
        counts = _launched(groups)
        # Ranks of one row of the mesh share a batch.
        backward(_batch(job, 10 * step + mesh["dp"].get_local_rank(), size))
        dp, tp = (now - then for now, then in zip(_launched(groups), counts, strict=True))
        gradients = {name: value.grad for name, value in parameters.items()}
        assert all(type(gradient) is Tensor for gradient in gradients.values())
        clones = {name: gradient.clone() for name, gradient in gradients.items()}
        record.backwards.append(BackwardRecord(clones, dp, synced=True))
        record.launches_of_tp.append(tp)
        optimizer.step()
    record.parameters = {name: value.detach().clone() for name, value in parameters.items()}
    return record


def _optimizer(job: Job, parameters: list[nn.Parameter]) -> Any:
    if job.learning_rate is None:
        return BySign(parameters, {})
    return torch.optim.SGD(parameters, lr=job.learning_rate, momentum=0.9)


def _backward_of(ddp: nn.Module, style: Style) -> Callable[[Tensor], None]:
    forward = torch.compile(ddp) if style == "outside" else ddp

    def step(batch: Tensor) -> None:
        output = forward(batch)
        if isinstance(output, DTensor):
            output = output.full_tensor()
        weights = torch.arange(output.numel()).view(output.shape) % 5 - 2
        (output * weights).sum().backward()

    return torch.compile(step) if style == "inside" else step


def _batch(job: Job, seed: int, size: int) -> Tensor:
    generator = Generator().manual_seed(seed)
    shape = (size, LENGTH, WIDTH)
    if job.learning_rate is None:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _launched(groups: list[ProcessGroup]) -> list[int]:
    # Its stubs leave it out.
    return [group._get_sequence_number_for_group() for group in groups]  # type: ignore[attr-defined]
