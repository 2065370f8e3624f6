"""A rank that trains beside eager DDP, and what it trains that the catalogue has not, as it needs a
GPU or ``"auto"``.

python -m gpu_checks.training_rank FILE_DESCRIPTOR
"""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection

import torch
from torch import nn

import fusion_passes
from benches.processes import Assignment
from benches.rank import Rank, main
from fusion_passes.state import process_state
from gpu_checks.parts import Check
from testing import models
from testing.scenarios.both_ways import train_both
from testing.scenarios.loop import sgd, train
from testing.scenarios.outcomes import RankReport
from testing.scenarios.run import Run


class TrainingRank(Rank):
    """A rank that trains."""

    def __init__(self, assignment: Assignment, connection: Connection) -> None:
        # Else convolutions round to 10 bits, and no two algorithms agree.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        super().__init__(assignment, connection)
        torch.set_num_threads(1)

    def train(self, check: Check) -> RankReport:
        """Train both ways, each as in a new process, and compare."""
        print(f"== {check.title}", flush=True)
        gc.collect()
        process_state.reset()
        return train_both(
            check.scenario, check.dtype, fusion_passes.FusionConfig(**check.flag), self._device
        )


# --- What the catalogue has not, as it needs a GPU or "auto" -------------------------------------


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], TrainingRank))
