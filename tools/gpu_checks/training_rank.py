"""A rank that trains beside eager DDP.

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
    """A rank that trains."""

    def __init__(self, assignment: Assignment) -> None:
        # Else convolutions round to 10 bits, and no two algorithms agree.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        super().__init__(assignment)
        torch.set_num_threads(1)

    def train(self, check: Check) -> Any:
        """Train both ways, each as in a new process, and compare: the report of a rank."""
        print(f"== {check.title}", flush=True)
        gc.collect()
        forget()
        # Without NCCL, its memory is the host's.
        is_real = self._device.type == "cuda"
        with contextlib.nullcontext() if is_real else registered_by_nobody():
            flag = flag_of(check.scenario, check.mode)
            return train_both(check.scenario, check.dtype, flag, self._device)


if __name__ == "__main__":
    serve(sys.argv[1:], TrainingRank)
