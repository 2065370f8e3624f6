"""One rank of a method of training that is timed.

python -m gpu_checks.rank ASSIGNMENT FILE_DESCRIPTOR
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace

from bench_steps.rank import Rank, main
from bench_steps.rows import Checked, Started, Stepped

BACKEND = "GPU_CHECK_BACKEND"
"""Environment variable: of the process group."""

HOST_STEPS = 5
"""In a row without waiting for the GPU: what they launch fits into its queue."""

HOST_ROUNDS = 9


class CheckRank(Rank):
    """The commands. Memory that a method has cached is given back after each, so that the
    processes of all methods fit."""

    def backend(self) -> str:
        return os.environ[BACKEND]

    def build(self) -> None:
        """Build the model, and import what that needs: no part of a start."""
        from workloads.models import SIZES, subject
        from workloads.ways import built

        self._made = subject(self._assignment.model, SIZES[self._assignment.size])
        self._model = built(self._made, self._device)

    def wrap(self) -> None:
        """Wrap what was built in DDP; ``"auto"`` measures the network in that."""
        from workloads.ways import EAGER, WAYS, prepare

        mine, made, model = self._assignment, self._made, self._model
        if mine.row.way == EAGER:
            # Compiled as with the others, so that what differs is how gradients are reduced.
            import torch._dynamo.config

            torch._dynamo.config.optimize_ddp = False
            WAYS[EAGER] = replace(WAYS[EAGER], style="outside")
        self._barrier()
        begin = time.perf_counter()
        self._training = prepare(mine.row.way, made, self._device, seed=mine.rank, model=model)
        self._run = self._training.run
        self._wrapped_s = time.perf_counter() - begin

    def start(self) -> Started:
        """Make the first step."""
        self._barrier()
        begin = time.perf_counter()
        self._run()
        self._synchronize()
        seconds = time.perf_counter() - begin
        self._log_phases(seconds)
        gradients = [p.grad for p in self._training.model.parameters() if p.grad is not None]
        sizes = tuple(gradient.nbytes for gradient in gradients)
        self._give_back()
        return Started(self._wrapped_s + seconds, sizes)

    def _log_phases(self, seconds: float) -> None:
        """Say in the log what a start was spent on, and what caches gave."""
        from torch._dynamo.utils import compile_times, counters

        print(f"wrapped in {self._wrapped_s:.3f} s, first step in {seconds:.3f} s")
        for kind in ("aot_autograd", "inductor", "compiled_autograd"):
            print(f"{kind}: {dict(counters[kind])}")
        print(compile_times(repr="str"), flush=True)

    def check(self, reference: str, write: bool) -> Checked:
        checked = super().check(reference, write)
        self._give_back()
        return checked

    def peak(self) -> int:
        peak = super().peak()
        self._give_back()
        return peak

    def steps(self, count: int) -> Stepped:
        """Make some steps after one that is not timed: it takes memory from the device again."""
        self._run()
        self._synchronize()
        stepped = super().steps(count)
        self._give_back()
        return stepped

    def add_up(self) -> None:
        """Average over all ranks, and sum.

        Raises:
            RuntimeError: a result is wrong.
        """
        import torch
        import torch.distributed as dist

        mine = self._assignment
        expected = {
            dist.ReduceOp.SUM: mine.ranks * (mine.ranks + 1) / 2,
            dist.ReduceOp.AVG: (mine.ranks + 1) / 2,
        }
        for operation, result in expected.items():
            values = torch.full([2**20], mine.rank + 1.0, device=self._device)
            dist.all_reduce(values, operation)
            if not torch.all(values == result):
                raise RuntimeError(f"{operation} is {values[0].item()}, not {result}")

    def reduce(self, num_bytes: int, count: int) -> Stepped:
        """Reduce so many bytes in one all-reduce, and nothing beside it."""
        import torch
        import torch.distributed as dist

        flat, kept = torch.zeros(num_bytes // 4, device=self._device), self._run
        self._run = lambda: dist.all_reduce(flat)
        try:
            return self.steps(count)
        finally:
            self._run = kept

    def host(self) -> float:
        """Seconds until the host has launched a step, its GPU not waited for."""
        found = []
        for _ in range(HOST_ROUNDS):
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_STEPS):
                self._run()
            found.append((time.perf_counter() - begin) / HOST_STEPS)
        return statistics.median(found)

    def _give_back(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CheckRank))
