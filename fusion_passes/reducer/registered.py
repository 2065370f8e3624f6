"""Buckets in memory that NCCL has registered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.layout.layout import Bucket, BucketIndex, Layout
from fusion_passes.reducer.rank_errors import RanksDisagreeError
from fusion_passes.torch_private.process_groups import begin_all_reduce
from fusion_passes.torch_private.registered_memory import RegisteredMemory, deregister_freed

_BEGINS_AT: Final = 512
"""Alignment of the start of each bucket, in bytes, as of torch's allocations."""


@dataclass
class RegisteredBuckets:
    """Memory that NCCL has registered with a process group: one allocation, which holds all buckets
    in their order.

    NCCL must find a bucket at the same offset on all ranks, in memory that all ranks registered.
    When a rank could free such memory depends on who still holds a gradient in it. So the memory is
    allocated once, when buckets are rebuilt, and all iterations use it.
    """

    group: Any
    label: str
    _memory: RegisteredMemory | None = None
    _buckets: dict[BucketIndex, Tensor] = field(default_factory=dict)

    def prepare(self, layout: Layout) -> None:
        """Allocate and register the memory of rebuilt buckets. All ranks call this, with the same
        layout.

        Raises:
            RanksDisagreeError: on every rank, if one of them could not allocate the memory.
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
            # Not a view: views share a version counter, and no bucket needs another one's.
            memory = torch.empty(0, dtype=bucket.dtype, device=device)
            memory.set_(storage, start // bucket.dtype.itemsize, (bucket.numel,), (1,))
            self._buckets[bucket.index] = memory

    def _allocate(self, device: torch.device, nbytes: int) -> RegisteredMemory:
        """Allocate the memory, and agree that all ranks have it: registering is a collective."""
        # Allocated first: if the device is full, there is no memory for this tensor afterwards.
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
        """The memory of a bucket, ``[bucket.numel]``; ``None`` before buckets are rebuilt."""
        deregister_freed()
        return self._buckets.get(bucket.index)

    def in_words(self) -> str:
        """A description of the memory for the report. Only NCCL's log says which kernels it picks
        for registered memory."""
        if self._memory is None:
            return "registered with NCCL when the buckets are rebuilt"
        return (
            f"registered with NCCL as symmetric memory, {self._memory.data.nbytes} bytes in one "
            "piece; which kernels it picks: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING"
        )

    def release(self) -> None:
        """Deregister the memory: no bucket is launched any more."""
        if self._memory is not None:
            self._memory.deregister()
