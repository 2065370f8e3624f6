"""Measures what collectives cost, and has all ranks know the same. All of it is collectives of one
process group, which each rank must call at the same point."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from fusion_passes.layout.caps import MIB
from fusion_passes.torch_private import ProcessGroup
from fusion_passes.torch_private.process_groups import (
    backend_name,
    group_timeout,
)
from fusion_passes.tuning.records import Place, Profile
from fusion_passes.tuning.tables import CostTable

WAIT_SECONDS: Final = 60.0
"""How long ranks wait for each other while they measure, at most; the group's timeout, if that is
shorter."""

SECONDS: Final = 3.0
"""For a table. Where the network is slow, the largest sizes are left out."""

SIZES: Final = tuple(2**power for power in range(10, 27))
"""Bytes that are measured. Smaller ones cost their latency, larger ones by their bytes."""

ROUNDS: Final = 5

IN_FLIGHT: Final = 8
"""Collectives of a size that are measured together, at most."""

IN_FLIGHT_BYTES: Final = 4 * MIB
"""Their bytes, at most; larger ones are measured alone."""

_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")

_T = TypeVar("_T")


# --- Ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The ranks that measure, seen from one of them.

    Attributes:
        group: their process group.
        device: on which the gradients are.
        timeout: of each collective: where a rank fails alone, the others need not wait for long.
    """

    group: ProcessGroup
    device: torch.device
    timeout: timedelta

    @staticmethod
    def of(group: ProcessGroup, device: torch.device) -> Ranks:
        timeout = min(group_timeout(group), timedelta(seconds=WAIT_SECONDS))
        return Ranks(group, device, timeout)

    @property
    def is_first(self) -> bool:
        """Whether this one is rank 0, which keeps files and speaks."""
        return self.group.rank() == 0

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """For each value the greatest of all ranks, which is the same number on all."""
        # float64 where the device has it, which all have that DDP runs on.
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self.reduce_all([values], dist.ReduceOp.MAX)
        return [float(value) for value in values.tolist()]

    def times(self, run: Callable[[], object]) -> list[float]:
        """Seconds of some rounds, each of its slowest rank. A round before them does not count."""
        run()
        measured = []
        for _ in range(ROUNDS):
            self.meet()
            begin = time.perf_counter()
            run()
            self._finish()
            measured.append(time.perf_counter() - begin)
        return self.slowest(measured)

    def reduce_all(
        self, tensors: Sequence[torch.Tensor], operation: dist.ReduceOp.RedOpType
    ) -> None:
        """Reduce tensors in place, all at the same time, and wait.

        Raises:
            RuntimeError: a rank has not come in time, or the backend says why it cannot be done.
        """
        works = [dist.all_reduce(item, operation, self.group, async_op=True) for item in tensors]
        for work in works:
            work.wait(self.timeout)

    def meet(self) -> None:
        """Wait for all ranks, and for what their devices have to do."""
        self.reduce_all([torch.zeros(1, device=self.device)], dist.ReduceOp.SUM)
        self._finish()

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


# --- Costs ---------------------------------------------------------------------------------------


def measure(
    ranks: Ranks,
    place: Place,
    dtype: torch.dtype,
    operation: dist.ReduceOp.RedOpType,
    seconds: float = SECONDS,
) -> Profile:
    """Measure a profile, the same on all ranks to the last nanosecond, in at most so many seconds
    if a single collective of 1 KiB is fast. Each rank must call this; rank 0 says so on stderr.

    Raises:
        RuntimeError: a rank has failed, or has not come in time.
    """
    if ranks.is_first:
        line = f"fusion_passes: measuring {place}, for at most about {seconds:g} s"
        print(line, file=sys.stderr, flush=True)
    try:
        table = _table(ranks, dtype, operation, seconds)
    except RuntimeError as error:
        raise RuntimeError(
            "torch._inductor.config.ddp_fusion = 'auto' measures the network while "
            f"DistributedDataParallel is constructed, and that has failed on rank "
            f"{ranks.group.rank()}: {error}. If it is a collective that has failed, another rank "
            "has probably died or stalled: look at its output."
        ) from error
    if ranks.is_first:
        print(f"fusion_passes: {place.collective}: {table}", file=sys.stderr, flush=True)
    return Profile(place, table)


def _table(
    ranks: Ranks, dtype: torch.dtype, operation: dist.ReduceOp.RedOpType, seconds: float
) -> CostTable:
    """The costs of a collective, sizes growing until the time is over.

    A cost is a share of the time that several take which are in flight together, as those of a
    backward are. One alone says little about it: over Gloo, with a core for each rank, one of 64
    KiB takes a tenth of that, and one of 1 MiB nearly twice as long (docs/decisions.md).
    """
    sizes, medians, spent = [], [], 0.0
    for size in SIZES:
        count = min(max(IN_FLIGHT_BYTES // size, 1), IN_FLIGHT)
        shape = count, size // dtype.itemsize
        buffers = torch.zeros(shape, dtype=dtype, device=ranks.device).unbind()
        times = ranks.times(
            lambda b=buffers: ranks.reduce_all(b, operation)  # type: ignore[misc]
        )
        sizes.append(size)
        medians.append(statistics.median(times) / count)
        # The same numbers on all ranks, which so stop together. The next size takes twice as long.
        spent += sum(times) * (ROUNDS + 1) / ROUNDS
        if spent + 2 * (ROUNDS + 1) * medians[-1] * count > seconds:
            break
    return CostTable.of(sizes, medians)


# --- What all ranks know -------------------------------------------------------------------------


def agree_on_place(ranks: Ranks, collective: str) -> Place:
    """The place of all ranks, which send by a collective: an all-gather."""
    device = ranks.device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    said = (f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ)
    of_all: list[Any] = [None] * ranks.group.size()
    # Over NCCL, this sends from the current card.
    with torch.cuda.device(device if device.type == "cuda" else -1):
        mine = socket.gethostname(), card, " ".join(said), torch.__version__
        dist.all_gather_object(of_all, mine, ranks.group)
    # Of hosts with other cards, names for their interfaces or versions of torch, each counts.
    hosts, devices, interfaces, torches = (tuple(sorted(set(c))) for c in zip(*of_all, strict=True))
    return Place(
        ranks.group.size(),
        hosts,
        backend_name(ranks.group, device),
        ", ".join(devices),
        ", ".join(interfaces),
        ", ".join(torches),
        collective,
    )


def of_first_rank(ranks: Ranks, mine: _T) -> _T:
    """What rank 0 has here: a broadcast, which each rank must call."""
    said = [mine]
    dist.broadcast_object_list(said, group=ranks.group, group_src=0, device=ranks.device)
    return said[0]
