"""What is trained beside eager DDP that the catalogue has not, as it needs a GPU or ``"auto"``.

Each takes a :class:`testing.scenarios.run.Run`, as the features of the catalogue do.
"""

from __future__ import annotations

from torch import nn

import fusion_passes
from testing import models
from testing.scenarios.loop import sgd, train
from testing.scenarios.run import Run


def measured(run: Run) -> None:
    """``"auto"``, in buckets that are chosen from what all-reduces cost here."""
    # Parameters stay whole numbers for as many steps as there are.
    train(run, run.ddp(run.mlp()), steps=10, optimizer=sgd(0.0))
    if not run.is_fused:
        return
    decisions = [sentence for m in fusion_passes.report().modules for sentence in m.decision]
    print(*decisions, sep="\n", flush=True)
    if not decisions:
        raise RuntimeError("nothing was decided from measurement")


def synced_batch_norm(run: Run) -> None:
    """``SyncBatchNorm``, which torch has for GPUs only."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.ConvNet())
    rounding = {"loss": models.square_loss, "draw": models.images}
    train(run, run.ddp(model), **rounding, optimizer=sgd(2.0**-6))
