"""Launches the buckets of a module in order, each once it is full."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from fusion_passes.layout.layout import Bucket, Layout, ParameterNumber, Piece
from fusion_passes.reducer.communication import (
    AllReduce,
    Communication,
    Wait,
    average_sparse,
    nothing,
)
from fusion_passes.reducer.memory import BucketMemory
from fusion_passes.torch_private.profiling import is_profiling, named_in_profile


class LaunchQueue:
    """The launch queue of one module. Modules that share a process group launch one after the
    other, in one order on all ranks.

    Attributes:
        communication: how a bucket is sent.
        name: the name of the module in profiles.
        previous, next: the queues of the neighbours in the launch order of the modules that share
            this process group in this backward.
        is_at_end: whether all buckets are launched at the end of the backward, because the walk did
            not find the module and other modules share its process group.
        lock: held while gradients are marked ready and buckets are launched. As in DDP: autograd
            has a thread for each accelerator.
        buckets: the buckets of the iteration, in launch order; empty between iterations.
    """

    def __init__(
        self,
        group: Any,
        name: str,
        communication: Communication,
        memory: BucketMemory,
        on_all_launched: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.communication = communication
        self.name = name
        self.previous: LaunchQueue | None = None
        self.next: LaunchQueue | None = None
        self.is_at_end = False
        self.lock = threading.RLock()
        self.buckets: Sequence[Bucket] = ()
        self._group = group
        self._memory = memory
        self._on_all_launched = on_all_launched
        self._layout = Layout((), {})
        self._pending: list[int] = []
        self._waits: list[Wait] = []

    def begin(self, layout: Layout) -> None:
        """Begin an iteration: every bucket lacks all its gradients."""
        self.buckets, self._layout = layout.buckets, layout
        self._pending = [len(bucket.numbers) for bucket in layout.buckets]
        self._waits = []

    def end(self) -> None:
        """End the iteration."""
        self.buckets, self._pending, self._waits = (), [], []

    def leave_order(self) -> None:
        """End the backward: no module launches before or after this one any more."""
        self.previous = self.next = None
        self.is_at_end = False

    @property
    def has_launched_all(self) -> bool:
        """Whether no bucket of the iteration is left."""
        return len(self._waits) == len(self.buckets)

    def mark_ready(self, numbers: Piece) -> None:
        """Mark gradients ready that lie in their buckets."""
        for index, count in self._layout.counts(numbers).items():
            self._pending[index] -= count

    def launch_ready(self) -> None:
        """Launch the buckets that are full and whose predecessors are launched, in order."""
        launched = len(self._waits)
        if launched < len(self.buckets) and self._pending[launched]:
            return  # Most gradients leave the next bucket incomplete.
        with self.lock:
            self._memory.join_streams()
            if self.is_at_end or (self.previous and not self.previous.has_launched_all):
                return
            before = len(self._waits)
            while not self.has_launched_all and not self._pending[len(self._waits)]:
                self._launch(self.buckets[len(self._waits)])
            if self.has_launched_all and before < len(self._waits):
                # Before the next module launches: it may have the same weights, and this module
                # still reads their local gradients.
                self._end_launches()
                if self.next is not None:
                    self.next.launch_ready()

    def launch_all(self) -> None:
        """Launch all buckets, whatever they lack."""
        self._pending = [0] * len(self.buckets)
        for bucket in self.buckets:
            self._launch(bucket)
        self._end_launches()

    def _end_launches(self) -> None:
        on_all_launched = self._on_all_launched()
        assert on_all_launched is not None, "the reducer lives as long as its queue"
        on_all_launched()

    def _launch(self, bucket: Bucket) -> None:
        """Launch the all-reduce of a bucket. In a profile it has the bucket's name."""
        name = bucket_name(self.name, bucket) if is_profiling() else ""
        if bucket.is_sparse:
            wait = self._launch_sparse(bucket.numbers[0], name)
        elif bucket.numel:
            wait = self.communication.launch(bucket, self._memory.of(bucket), name)
            wait = named_in_profile(wait, f"{name} wait") if name else wait
        else:
            wait = nothing
        self._waits.append(wait)

    def _launch_sparse(self, number: ParameterNumber, name: str) -> Wait:
        assert isinstance(self.communication, AllReduce), "no hook is given sparse gradients"
        gradient, divisor = self._memory.sparse_gradient(number), self.communication.divisor()
        self._memory.sparse[number] = average_sparse(self._group, gradient, divisor, name)
        return nothing

    def is_launched(self, bucket: Bucket) -> bool:
        return bucket.index < len(self._waits)

    def wait_for(self, bucket: Bucket) -> None:
        """Wait for a launched bucket. A second call does nothing."""
        wait, self._waits[bucket.index] = self._waits[bucket.index], nothing
        wait()


def bucket_name(name: str, bucket: Bucket) -> str:
    """A bucket in reports and profiles: ``DDP 0 (Net) bucket 3``."""
    return f"{name} bucket {bucket.index}"
