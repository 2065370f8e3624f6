"""Models in several graphs: cut by graph breaks, compiled in parts, or not compiled at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, Exact, linear_loss
from testing.scenarios.features.backwards import assert_kept, gradients_of, note_grad
from testing.scenarios.features.models import InParts, as_it_is
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run


def in_parts(run: Run) -> None:
    """Each graph launches its own part while the next ones compute."""
    ddp, forward = run.compiled(InParts(), bucket_cap_mb=2e-4)
    backwards(run, ddp, forward)
    backwards(run, ddp, forward, 1, first=3, zero="never", synced=False)
    before = gradients_of(ddp)
    backwards(run, ddp, forward, 1, first=4, zero="never")
    assert_kept(ddp, before)
    note_grad(run, ddp, linear_loss(forward, run.rows(5)))
    backwards(run, ddp, forward, 1)


class Gated(Exact):
    """Exact. Two parallel layers, one of which may be left out of the backward."""

    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__(first=nn.Linear(WIDTH, outputs), gate=nn.Linear(WIDTH, outputs))

    def forward(self, x: Tensor, opens: bool = True) -> Tensor:
        y, gate = self.first(x), self.gate(x)
        return y.relu() + (gate if opens else gate.detach())


class _Blocks(Exact, first=WIDTH, last=WIDTH):
    """Exact. Blocks between layers, the first of which shares its weight with the last."""

    def __init__(self) -> None:
        super().__init__(blocks=nn.ModuleList(Gated() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return (self.last(y) @ self.first.weight)[:, :OUTPUTS]


def block_by_block(run: Run) -> None:
    """All blocks share a compiled forward. The layers around them are not compiled."""
    model = _Blocks()
    model.blocks = nn.ModuleList(map(run.compile, model.blocks))
    ddp = run.ddp(model, bucket_cap_mb=1e-4)
    backwards(run, ddp, ddp)
    backwards(run, ddp, ddp, 1, first=3, zero="never", synced=False)
    backwards(run, ddp, ddp, 1, first=4, zero="never")
    ddp.zero_grad(set_to_none=False)
    for size in (5, 6 + dist.get_rank()):
        linear_loss(ddp, run.rows(5, size=size)).backward()
    run.note_backward(ddp)


def breaks_in_a_loop(run: Run) -> None:
    """Dynamo does not compile such a forward, but the functions that it calls."""
    model = _Blocks()
    for block in model.blocks:
        block.register_forward_hook(lambda *args: as_it_is(args[2]))
    backwards(run, *run.compiled(model))


class _SharedByParts(Exact, first=WIDTH, second=WIDTH):
    """Exact. Two graphs use one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(as_it_is(self.first(x))) @ self.first.weight)[:, :OUTPUTS]


def shared_by_parts(run: Run) -> None:
    """A gradient that comes from two graphs."""
    backwards(run, *run.compiled(_SharedByParts()))


def broken_backward(run: Run) -> None:
    """A hook that is not traced cuts the backward into two graphs. Ranks accumulate different
    numbers of micro-batches; nothing of a step is left in the store."""
    model = run.mlp()
    hook = torch.compiler.disable(lambda gradient: gradient * 2)
    model[2].register_forward_hook(
        torch.compiler.disable(lambda _, __, output: output.register_hook(hook) and None)
    )
    ddp, forward = run.compiled(model)
    keys = []
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            for micro in range(1 + dist.get_rank()):
                linear_loss(forward, run.rows(step, 1 + micro)).backward()
        run.note_backward(ddp, synced=False)
        backwards(run, ddp, forward, 1, first=step, zero="never")
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()  # A rank that has ended writes to the store too.
    run.note("keys of the last two steps", keys[-1] - keys[1])
