"""Collectives of the model on the process group, in its forward and in its backward, as in
``SyncBatchNorm`` on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, Average, Exact
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run


class _Centred(nn.Module):
    """Exact. Subtracts from each row the average over the rows of all ranks; inside the graph, or
    between two graphs."""

    def __init__(self, breaks: bool, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.average = torch.compiler.disable(Average.apply) if breaks else Average.apply

    def forward(self, x: Tensor) -> Tensor:
        return x - self.average(x.sum(0) / 4, self.group)


class Synced(Exact, first=WIDTH):
    """Exact. Layers between two such collectives, in any order; a step may skip some."""

    def __init__(
        self, breaks: bool = False, group: dist.ProcessGroup | None = None, names: str = "abc"
    ) -> None:
        layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        super().__init__(layers=layers, last=nn.Linear(WIDTH, OUTPUTS))
        self.before, self.behind = _Centred(breaks, group), _Centred(breaks, group)

    def forward(self, x: Tensor, takes: str | None = None) -> Tensor:
        y = self.before(self.first(x))
        for name in self.layers if takes is None else takes:
            y = y + self.layers[name](y.relu()) / 8
        return self.last(self.behind(y))


class _Scaled(Exact, first=WIDTH, last=WIDTH):
    """Exact. With one row, the gradient of the scale is ready together with those of the last
    layer, and stored with them; with more rows, a matrix product is between them."""

    def __init__(self) -> None:
        super().__init__(scale=nn.Parameter(torch.empty(WIDTH)))
        self.centred = _Centred(breaks=False, group=None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.centred(self.first(x))
        return (y + self.last(y))[:, :OUTPUTS]


def in_graphs(run: Run) -> None:
    """Collectives in the graph, and between several graphs."""
    for breaks in (False, True):
        backwards(run, *run.compiled(Synced(breaks, names="a"), bucket_cap_mb=3e-4))


def batch_sizes(run: Run) -> None:
    """Batch sizes, and so graphs, that differ between ranks: ranks launch these collectives and the
    buckets in one order nevertheless. Two buckets are stored in each part of a backward."""
    ddp, forward = run.compiled(Synced(names="abc"), bucket_cap_mb=3e-4)
    for step, sizes in enumerate(((3, 2), (5, 1), (5, 1), (2, 4))):
        backwards(run, ddp, forward, 1, first=step, size=sizes[dist.get_rank()])


def first_batch_sizes(run: Run) -> None:
    """Batch sizes that differ between ranks from the first step on. The graph of the second rank,
    compiled before there was a layout, stores other pieces than that of the first rank, from which
    the layout is made."""
    ddp, forward = run.compiled(_Scaled(), bucket_cap_mb=280 / 2**20)
    backwards(run, ddp, forward, 3, size=4 if dist.get_rank() == 0 else 1)


def with_unused(run: Run) -> None:
    """Ranks skip layers between the collectives, the same ones or not: in one graph from the second
    step on, in several graphs from the first. The layer that is always used is the first that a
    backward reaches, because eager DDP needs it."""
    for breaks, takes in ((False, "ab b/ab"), (True, "ab/b ab b/ab")):
        model = Synced(breaks, names="ab")
        ddp = run.ddp(model, bucket_cap_mb=3e-4, find_unused_parameters=True)
        train(run, ddp, takes=takes, moves=False)
