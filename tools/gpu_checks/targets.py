"""What is trained beside eager DDP that the catalogue has not, as it needs a GPU or an option.

Each takes a :class:`testing.scenarios.run.Run`, as the features of the catalogue do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fusion_passes
from testing import models
from testing.models import Batch
from testing.scenarios.features.hooks import renamed
from testing.scenarios.loop import Loop, train
from testing.scenarios.run import Run

GRAPH_STEPS = 6
"""The first steps warm up and record; the others replay."""

# --- Options -------------------------------------------------------------------------------------


def sent_in_bf16(run: Run) -> None:
    """``reduce_dtype="bf16"`` beside DDP's hook that does the same."""
    _sent(run, default_hooks.bf16_compress_hook)


def sent_in_fp16(run: Run) -> None:
    """``reduce_dtype="fp16"`` beside DDP's hook that does the same."""
    _sent(run, default_hooks.fp16_compress_hook)


def _sent(run: Run, hook: Any) -> None:
    ddp = run.ddp(models.mlp(2))
    if not run.is_fused:
        ddp.register_comm_hook(None, renamed(hook))
    train(run, ddp)


# --- Memory that is used again -------------------------------------------------------------------

MIXING_WIDTH = 64


class Mixing(nn.Module):
    """Saves results of tanh, softmax and cat, whose gradients can be computed in their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = MIXING_WIDTH
        self.first, self.second = nn.Linear(models.WIDTH, width), nn.Linear(width, width)
        self.last = nn.Linear(width, models.OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        gate = torch.softmax(self.second(hidden), -1)
        both = torch.cat([gate, hidden], -1).square().sum(-1, keepdim=True)
        mixed: Tensor = self.last(gate * hidden).log_softmax(-1) + both
        return mixed


def donated(run: Run) -> None:
    """A backward that may overwrite all that was saved for it."""
    _mix(run, lambda loss, _: loss.backward())


def donated_later(run: Run) -> None:
    """Two backwards through one forward: the first must leave what was saved."""

    def twice(loss: Tensor, note: Callable[[], None]) -> None:
        loss.backward(retain_graph=True)
        note()
        loss.backward()

    _mix(run, twice)


def donated_twice(run: Run) -> None:
    """Two forwards before a backward: each has saved tensors of its own."""
    _mix(run, lambda loss, _: loss.backward(), forwards=2)


def _mix(
    run: Run, backward: Callable[[Tensor, Callable[[], None]], None], forwards: int = 1
) -> None:
    ddp = run.ddp(Mixing().to(run.dtype))
    forward = run.compile(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-6)

    def loss(batch: Batch) -> Tensor:
        value: Tensor = (forward(batch[0]) * batch[1]).sum()
        return value

    for step in range(3):
        optimizer.zero_grad()
        batches = [run.rows(step, number) for number in range(forwards)]
        total = torch.stack([loss(batch) for batch in batches]).sum()
        backward(total, lambda: run.note_backward(ddp))
        run.note_backward(ddp)
        optimizer.step()
    run.note_end(ddp)


# --- CUDA graphs ---------------------------------------------------------------------------------


def cuda_graphs(run: Run) -> None:
    """``mode="reduce-overhead"``, the backward outside of the compiled model."""
    _replay(run, Loop(steps=GRAPH_STEPS, options={"mode": "reduce-overhead"}))


def cuda_graphs_inside(run: Run) -> None:
    """The same with the backward inside of the compiled function."""
    loop = Loop(style="inside", steps=GRAPH_STEPS, options={"mode": "reduce-overhead"})
    _replay(run, loop)


def _replay(run: Run, loop: Loop) -> None:
    skipped = counters["inductor"]["cudagraph_skips"]
    train(run, run.ddp(run.mlp()), loop)
    if not run.is_fused or run.device.type != "cuda":
        return
    skipped = counters["inductor"]["cudagraph_skips"] - skipped
    found = f"torch recorded {recorded_graphs(run.device)} CUDA graphs and skipped {skipped}"
    print(found, flush=True)
    if not recorded_graphs(run.device):
        raise RuntimeError(found)


def recorded_graphs(device: torch.device) -> int:
    """CUDA graphs that this process has recorded and kept."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index, create_if_none_exists=False)
    waiting = (
        [] if manager is None else [node for nodes in manager.roots.values() for node in nodes]
    )
    count = 0
    while waiting:
        node = waiting.pop()
        waiting += [child for nodes in node.children.values() for child in nodes]
        count += 1
    return count


# --- Measured buckets ----------------------------------------------------------------------------


def measured(run: Run) -> None:
    """``"auto"``, in buckets that are chosen from what all-reduces cost here."""
    still = Loop(
        steps=10,
        # Parameters stay whole numbers for as many steps as there are.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    train(run, run.ddp(run.mlp()), still)
    if not run.is_fused:
        return
    decisions = [sentence for m in fusion_passes.report().modules for sentence in m.decision]
    print(*decisions, sep="\n", flush=True)
    if not decisions:
        raise RuntimeError("nothing was decided from measurement")


# --- GPUs only -----------------------------------------------------------------------------------


def synced_batch_norm(run: Run) -> None:
    """``SyncBatchNorm``, which torch has for GPUs only."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.ConvNet())
    loop = Loop(
        loss=models.square_loss,
        draw=models.images,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2.0**-6),
    )
    train(run, run.ddp(model), loop)
