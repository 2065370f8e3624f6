"""What is trained beside eager DDP that the catalogue has not, as it needs a GPU or ``"auto"``.

Each takes a :class:`testing.scenarios.run.Run`, as the features of the catalogue do.
"""

from __future__ import annotations

import torch
from torch import nn

import fusion_passes
from testing import models
from testing.scenarios.loop import Loop, train
from testing.scenarios.run import Run


def measured(run: Run) -> None:
    """``"auto"``, in buckets that are chosen from what all-reduces cost here."""
    still = Loop(
        steps=10,
        # Parameters stay whole numbers for as many steps as there are.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    ddp = run.ddp(run.mlp())
    train(run, ddp, still)
    if not run.is_fused:
        return
    decisions = [sentence for m in fusion_passes.report().modules for sentence in m.decision]
    print(*decisions, sep="\n", flush=True)
    if not decisions:
        raise RuntimeError("nothing was decided from measurement")


def synced_batch_norm(run: Run) -> None:
    """``SyncBatchNorm``, which torch has for GPUs only."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.ConvNet())
    loop = Loop(
        loss=models.square_loss,
        draw=models.images,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2.0**-6),
    )
    train(run, run.ddp(model), loop)
