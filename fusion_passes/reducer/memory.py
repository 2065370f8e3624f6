"""Buckets in memory that NCCL has registered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.layout.layout import Bucket, Layout
from fusion_passes.reducer.rank_errors import RanksDisagreeError
from fusion_passes.torch_private.process_groups import begin_all_reduce
from fusion_passes.torch_private.registered_memory import RegisteredMemory, deregister_freed

_BEGINS_AT: Final = 512
"""Bytes: each bucket begins at a multiple of it, as torch's allocations do."""


@dataclass
class RegisteredBuckets:
    """Memory that NCCL has registered with a group: one piece, in which all buckets lie in their
    order.

    NCCL must find a bucket at the same offset on all ranks, in memory that all have registered.
    What a rank frees, and when, depends on who else keeps a gradient there. So memory is allocated
    once, where buckets are rebuilt, and every round has the same.
    """

    group: Any
    label: str
    _memory: RegisteredMemory | None = None
    _buckets: dict[int, Tensor] = field(default_factory=dict)

    def prepare(self, layout: Layout) -> None:
        """The buckets have been rebuilt: all ranks call this, with the same layout.

        Raises:
            RanksDisagreeError: on every rank, where one could not allocate the memory.
        """
        buckets = [bucket for bucket in layout.buckets if bucket.numel and not bucket.is_sparse]
        sizes = [bucket.numel * bucket.dtype.itemsize for bucket in buckets]
        ends = [*itertools.accumulate(-(-size // _BEGINS_AT) * _BEGINS_AT for size in sizes)]
        if not buckets:
            return
        device = buckets[0].device
        self._memory = self._allocate(device, ends[-1])
        self._memory.register()
        storage = self._memory.data.untyped_storage()
        for bucket, start in zip(buckets, [0, *ends], strict=False):
            # No view: what is written to one bucket is nothing that another one has to know.
            memory = torch.empty(0, dtype=bucket.dtype, device=device)
            memory.set_(storage, start // bucket.dtype.itemsize, (bucket.numel,), (1,))
            self._buckets[bucket.index] = memory

    def _allocate(self, device: torch.device, nbytes: int) -> RegisteredMemory:
        """Allocate the memory, and agree that all ranks have it: to register it is a collective."""
        # Where the device is full, there is no memory later for what is sent.
        are_there = torch.zeros(self.group.size(), dtype=torch.int32, device=device)
        memory, failure = None, None
        try:
            memory = RegisteredMemory(self.group, device, nbytes)
            are_there[self.group.rank()] = 1
        except RuntimeError as error:
            failure = error
        if self.group.size() > 1:
            begin_all_reduce(self.group, are_there, dist.ReduceOp.SUM)()
        without = [str(rank) for rank, is_there in enumerate(are_there.tolist()) if not is_there]
        if memory is None or without:
            raise RanksDisagreeError(
                self.label,
                f"FusionConfig.memory = 'registered' of {self.label} needs {nbytes} bytes of "
                f"NCCL's memory on each rank, which rank {', '.join(without)} could not allocate. "
                "Free memory of the GPU there, or set memory = 'plain'.",
            ) from failure
        return memory

    def of(self, bucket: Bucket) -> Tensor | None:
        """Memory of a bucket, ``[bucket.numel]``; ``None`` before buckets have been rebuilt."""
        deregister_freed()
        return self._buckets.get(bucket.index)

    def in_words(self) -> str:
        """What it is, for the report. Which kernels NCCL picks then, only its log says."""
        if self._memory is None:
            return "registered with NCCL when the buckets are rebuilt"
        return (
            f"registered with NCCL as symmetric memory, {self._memory.data.nbytes} bytes in one "
            "piece; which kernels it picks: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING"
        )

    def release(self) -> None:
        """No bucket is launched any more."""
        if self._memory is not None:
            self._memory.deregister()
