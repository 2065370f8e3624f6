"""One rank of the bench of options: trains with an option of DDP, as it is told over a pipe.

python -m bench_steps.option_rank ASSIGNMENT FILE_DESCRIPTOR
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from typing import Any

from bench_steps.rank import Rank, main
from bench_steps.rows import Checked, Stepped

LEFT_OUT = 2
"""Steps of a block for which the last rank has no inputs, inside of ``join``."""


class OptionRank(Rank):
    """The commands; each is called on all ranks at the same time."""

    def start_option(self, name: str) -> list[str]:
        """Prepare the row's method with an option, and make its first step.

        Returns:
            What the package has warned of.
        """
        import torch

        from workloads.models import SIZES, subject
        from workloads.options import OPTIONS
        from workloads.ways import WAYS, Training, built, configure

        mine, self._option = self._assignment, OPTIONS[name]
        way = WAYS[mine.row.way]
        configure(way)
        made = subject(mine.model, SIZES[mine.size])
        torch.manual_seed(0)
        model = self._option.around(built(made, self._device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._ddp = self._option.wrap(model, own_reducer=not way.is_ours)
            forward, steps = torch.compile(self._ddp), itertools.count()

            def step(batch: tuple[torch.Tensor, ...]) -> None:
                loss = forward(*self._option.inputs(next(steps), mine.rank), *batch)
                (self._option.scale * loss).backward()

            batch = tuple(tensor.to(self._device) for tensor in made.batch(mine.rank))
            self._training = Training(model, step, (batch,))
            self._run = self._training.run
            self._run()
        warned = [w for w in caught if w.category.__name__ == "FusionWarning"]
        return [str(warning.message) for warning in warned]

    def steps(self, count: int) -> Stepped:
        """Make some steps, once all ranks are ready; with ``join``, not all on the last rank."""
        if not self._option.joins:
            return super().steps(count)
        mine = self._assignment
        self._barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        with self._ddp.join():
            for _ in range(count - LEFT_OUT * (mine.rank == mine.ranks - 1)):
                self._run()
        seconds = (time.perf_counter() - begin) / count
        return Stepped((seconds,), time.process_time() - cpu)

    def check(self, reference: str, write: bool) -> Checked:
        """Compare the gradients of the last step with what another method left in the file
        ``reference``, or write them there."""
        import torch

        from bench_steps.gradients import compare

        self._synchronize()
        gradients: dict[str, Any] = {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).cpu()
            for name, p in self._training.model.named_parameters()
            if p.grad is not None
        }
        path = f"{reference}-{self._assignment.rank}"
        if write:
            torch.save(gradients, path)
        return compare(gradients, torch.load(path, weights_only=True), {}, {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], OptionRank))
