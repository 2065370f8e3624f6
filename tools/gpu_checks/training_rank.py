"""A rank that trains scenarios with eager DDP and under the flag, and compares.

python -m gpu_checks.training_rank FILE_DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import torch

from benches.processes import Assignment, serve
from benches.rank import Rank
from gpu_checks.parts import Check
from testing.fresh import forget
from testing.registered import registered_by_nobody
from testing.scenarios.both_ways import flag_of, train_both


class TrainingRank(Rank):
    """The commands of a bench's rank, and one that trains a check."""

    def __init__(self, assignment: Assignment) -> None:
        # In TF32, convolutions round to 10 bits, and different algorithms give different results.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        super().__init__(assignment)
        torch.set_num_threads(1)

    def train(self, check: Check) -> Any:
        """Train a check with eager DDP and under the flag, and return this rank's report."""
        print(f"== {check.title}", flush=True)
        gc.collect()
        forget()
        # Without NCCL, registered memory is host memory.
        is_real = self._device.type == "cuda"
        with contextlib.nullcontext() if is_real else registered_by_nobody():
            flag = flag_of(check.scenario, check.mode)
            return train_both(check.scenario, check.dtype, flag, self._device)


if __name__ == "__main__":
    serve(sys.argv[1:], TrainingRank)
