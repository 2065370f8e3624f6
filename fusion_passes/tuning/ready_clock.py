"""Measures when the gradients of a module are ready, in some rounds of a run: a later run plans its
buckets from that.

In these rounds a rank launches nothing before it has all gradients, since a collective takes from
the compute beside it. The median of the rounds counts, and of the ranks the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from fusion_passes.torch_private.process_groups import begin_all_reduce

SKIPPED_ROUNDS: Final = 3
"""The first ones compile, and fill caches."""

MEASURED_ROUNDS: Final = 5

_UNKNOWN: Final = -1


class ReadyClock:
    """See the module. Once, on every rank, ``on_measured`` is called with when each gradient is
    ready: nanoseconds from the start of the backward, by the parameter's number, in the order in
    which they come.

    Attributes:
        is_running: whether this round is measured; the same on all ranks.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        numbers: Sequence[int],
        on_measured: Callable[[Mapping[int, int]], None],
    ) -> None:
        self.is_running = False
        self._group = group
        self._device = device
        self._numbers = tuple(numbers)
        self._on_measured = on_measured
        self._ended = 0
        self._begin: Any = None
        self._noted: list[tuple[Sequence[int], Any]] = []
        self._rounds: list[tuple[Any, list[tuple[Sequence[int], Any]]]] = []

    def begin_round(self) -> None:
        """A backward begins whose gradients are averaged."""
        self.is_running = self._ended >= SKIPPED_ROUNDS and not _is_captured(self._device)
        if self.is_running:
            self._noted = []
            self._begin = self._now()

    def note_ready(self, numbers: Sequence[int]) -> None:
        """These gradients are ready."""
        if self.is_running:
            self._noted.append((numbers, self._now()))

    def end_round(self) -> bool:
        """A round has ended: this is called in every one, on every rank.

        Returns:
            Whether it was the last one that is measured.
        """
        if _is_captured(self._device):
            return False
        if self.is_running:
            self._rounds.append((self._begin, self._noted))
            self.is_running = False
        self._ended += 1
        if self._ended < SKIPPED_ROUNDS + MEASURED_ROUNDS:
            return False
        self._on_measured(self._slowest())
        return True

    def _now(self) -> Any:
        """This moment: of a GPU an event, since it computes later than it is told to."""
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since(self, begin: Any, moment: Any) -> int:
        """How many nanoseconds lie between two moments that have passed."""
        if self._device.type != "cuda":
            return int(moment - begin)
        elapsed_ms: float = begin.elapsed_time(moment)
        return max(round(elapsed_ms * 1e6), 0)

    def _slowest(self) -> dict[int, int]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # Once in a training.
        times: dict[int, list[int]] = {}
        for begin, noted in self._rounds:
            for numbers, moment in noted:
                elapsed = self._since(begin, moment)
                for number in numbers:
                    times.setdefault(number, []).append(elapsed)
        mine = [
            int(statistics.median(times[number])) if number in times else _UNKNOWN
            for number in self._numbers
        ]
        slowest = torch.tensor(mine, dtype=torch.int64, device=self._device)
        begin_all_reduce(self._group, slowest, torch.distributed.ReduceOp.MAX)()
        pairs = zip(self._numbers, slowest.tolist(), strict=True)
        known = {number: ready for number, ready in pairs if ready != _UNKNOWN}
        # Those that come together stay in the order in which this rank has seen them.
        seen = {number: place for place, number in enumerate(times)}
        order = sorted(known, key=lambda number: (known[number], seen.get(number, len(seen))))
        return {number: known[number] for number in order}


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured, which runs later, and more than once."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
