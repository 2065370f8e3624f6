"""``fully_shard`` beside DDP, and inside of a DDP module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.scenarios.loop import Style, train
from testing.scenarios.run import Run


class _Beside(nn.Module):
    """A replicated, compiled part before a sharded one."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        super().__init__()
        self.replicated = run.ddp(run.mlp(2, models.WIDTH))
        self.sharded = run.mlp(2).to(run.device)
        fully_shard(self.sharded, mesh=mesh)
        self.forward_replicated = run.compile(self.replicated)

    def forward(self, x: Tensor) -> Tensor:
        return self.sharded(self.forward_replicated(x).relu())


def beside(run: Run, style: Style = "as it is") -> None:
    """A model with a part that is sharded over all ranks."""
    train(run, _Beside(run, run.mesh((2,), ("dp",))), style=style)


def hybrid_beside(run: Run) -> None:
    """HSDP: sharded over two ranks, replicated over two."""
    mesh = run.mesh((2, 2), ("replicate", "shard"))
    train(run, _Beside(run, mesh), style="as it is")


class _Within(nn.Module):
    """Layers around a sharded one."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first = run.mlp(2, models.WIDTH)
        self.sharded = run.mlp(2, models.WIDTH).to(run.device)
        self.last = run.mlp(2)
        fully_shard(self.sharded, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.sharded(self.first(x).relu()).relu())


def within(run: Run) -> None:
    """A submodule that FSDP manages, and that DDP is told to ignore."""
    model = _Within(run, run.mesh((2,), ("dp",)))
    names = [name for name, _ in model.named_parameters() if name.startswith("sharded.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    train(run, run.ddp(model))
