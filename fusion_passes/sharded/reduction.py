"""Sends each gradient to the rank that owns its parameter, and to no other."""

from __future__ import annotations

import threading
import types
from collections.abc import Collection
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.layout.layout import Bucket, ParameterNumber, Piece
from fusion_passes.reducer.communication import AllReduce, Wait, collective_averages
from fusion_passes.reducer.hooks import ParameterHooks
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.torch_private.autograd import version_of_tensor
from fusion_passes.torch_private.process_groups import GRADIENTS, begin_exchange, begin_reduces
from fusion_passes.torch_private.profiling import range_in_profile

_Mark: TypeAlias = tuple[int, int]
"""The address of a gradient, and its version counter: another pair after it was written to."""


class ReduceToOwners(AllReduce):
    """Averages each bucket on the owners of its parameters.

    In a bucket, the gradients of one owner lie together, so each owner's part is sent to it as it
    lies. NCCL reduces it there. Over other backends, the owner receives the parts of all ranks, and
    adds them to its own.

    As with DDP, a gradient that exists before a backward takes part in the average. If it is an
    average itself, the owner alone has it, and all ranks would have had it: it counts as often as
    there are ranks. So the owner keeps a copy of it from the first backward that adds gradients of
    this rank to it until that sum is averaged.

    Attributes:
        elsewhere: the parameters that other ranks own.
        held: the parameters that an optimizer was seen to hold.
        stepped_by: the id of the optimizer that has stepped a parameter since the last average.
        step: the frame of a step that has begun; ``None`` once its parameters have been sent.
        thread: the thread that trains the module, as far as that is known.
        is_checked: whether other modules were looked at for the same parameters.
    """

    def __init__(self, like: AllReduce, parameters: Parameters) -> None:
        super().__init__(like.group, like.backend, dtype=like.dtype)
        rank, kinds = self.group.rank(), parameters.kinds
        self.elsewhere = frozenset(n for n, kind in kinds.items() if kind.owner != rank)
        self.held: set[ParameterNumber] = set()
        self.stepped_by: dict[ParameterNumber, int] = {}
        self.step: types.FrameType | None = None
        self.thread: threading.Thread | None = None
        self.is_checked = False
        self._parameters = parameters
        self._local: dict[ParameterNumber, _Mark] = {}
        self._averages: dict[ParameterNumber, tuple[_Mark, Tensor]] = {}
        self._known: dict[Piece, tuple[list[int], list[slice]]] = {}

    # --- Launches --------------------------------------------------------------------------------

    def launch(self, bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        """Launch the reduction of a bucket's gradients, ``[bucket.numel]``, to their owners. Once
        it has been waited for, this rank's part of the memory holds averages; the rest is
        undefined."""
        ranks = self.group.size()
        sizes, gaps = self._divided(bucket)
        for gap in gaps:  # They are sent too, and NCCL may be asked to check that for NaN.
            memory[gap].zero_()
        real = torch.view_as_real(memory).view(-1) if memory.is_complex() else memory
        sizes = [size * real.numel() // memory.numel() for size in sizes]
        is_collective = self.averages(memory.dtype)
        is_first = torch.float16 in (memory.dtype, self.dtype)  # It has a small range.
        if is_first:
            real.div_(ranks)
        self._add_averages(bucket, memory, 1 / ranks if is_first else 1)
        sent = real.to(self.sent_dtype(memory.dtype))
        parts, rank = sent.split(sizes), self.group.rank()
        mine = real.split(sizes)[rank]
        received: list[Tensor] = []
        with range_in_profile(f"{name} launch"):
            if self.backend == "nccl":
                operation = dist.ReduceOp.AVG if is_collective else dist.ReduceOp.SUM
                wait_for_sent = begin_reduces(self.group, parts, sent, operation)
            else:
                others = [other for other in range(ranks) if other != rank]
                received = [torch.empty_like(parts[rank]) for _ in others if mine.numel()]
                wait_for_sent = begin_exchange(
                    self.group,
                    [(other, parts[other]) for other in others if sizes[other]],
                    list(zip(others, received, strict=False)),
                    GRADIENTS,
                )

        def wait() -> None:
            wait_for_sent()
            for part in received:
                parts[rank].add_(part)
            if sent is not real:
                mine.copy_(parts[rank])
            for part in (*received, sent) if sent.device.type != "cpu" else ():
                # It was allocated on the stream of the launch.
                part.record_stream(torch.accelerator.current_stream(sent.device))
            if not (is_first or is_collective):
                mine.div_(ranks)

        return wait

    def _divided(self, bucket: Bucket) -> tuple[list[int], list[slice]]:
        """The number of elements of each rank's part of a bucket, with the space behind it, and
        where such space is. Looked up after the first call for these gradients."""
        known = self._known.get(bucket.numbers)
        if known is None:
            kinds, sizes, gaps = self._parameters.kinds, [0] * self.group.size(), list[slice]()
            ends = [*bucket.offsets[1:], bucket.numel]
            for number, begin, end in zip(bucket.numbers, bucket.offsets, ends, strict=True):
                sizes[kinds[number].owner] += end - begin
                if begin + kinds[number].numel < end:
                    gaps.append(slice(begin + kinds[number].numel, end))
            known = self._known[bucket.numbers] = sizes, gaps
        return known

    def scaling(self, dtype: torch.dtype) -> str:
        if self.averages(dtype):
            return "collective"
        return "bucket" if torch.float16 in (dtype, self.dtype) else "result"

    def averages(self, dtype: torch.dtype) -> bool:
        sent, ranks = self.sent_dtype(dtype), self.group.size()
        is_as_it_lies = sent == dtype.to_real() and self.backend == "nccl"
        return is_as_it_lies and collective_averages(self.backend, sent, ranks, self.scaling_option)

    # --- Gradients that exist before a backward --------------------------------------------------

    def note_averages(self, received: Collection[ParameterNumber], hooks: ParameterHooks) -> str:
        """Look at the gradients that exist before a backward: keep a copy of the averages among
        them, to which the backward may add.

        Args:
            received: parameters whose gradient has been received in this iteration.
            hooks: the hooks on the parameters.

        Returns:
            Why the gradients cannot be averaged as DDP would; empty if they can.
        """
        for number in self._parameters.numbers:
            gradient = self._parameters.all[number].grad
            if gradient is None:
                self._local.pop(number, None)
                self._averages.pop(number, None)
            elif number not in received:
                why = self._note_existing(number, gradient)
                if not why and number in self._averages and hooks.see_accumulated(number):
                    why = _HOOKED if self._averages[number][1].any() else ""
                if why:
                    return why.format(name=self._parameters.names[number])
        return ""

    def _note_existing(self, number: ParameterNumber, gradient: Tensor) -> str:
        mark, local = _mark(gradient), self._local.get(number)
        average = self._averages.get(number)
        if local is None and number in self.elsewhere:
            if gradient.any():
                return _NOT_OWNED
        elif local is None:
            if average is None or average[0] != mark:
                self._averages[number] = mark, gradient.detach().clone()
        elif average is None:
            self._local[number] = mark
        elif local != mark:  # It was written to since the last backward.
            if gradient.any():
                return _ADDED
            del self._local[number], self._averages[number]
        return ""

    def note_local(self, number: ParameterNumber) -> None:
        gradient = self._parameters.all[number].grad
        if gradient is not None:
            self._local[number] = _mark(gradient)

    def has_local(self, numbers: Collection[ParameterNumber]) -> set[ParameterNumber]:
        """Find the parameters whose ``.grad`` has gradients of this rank alone."""
        parameters = self._parameters.all
        held = {number for number in numbers if parameters[number].grad is not None}
        return {n for n in held if n in self._local or n in self.elsewhere}

    def end_iteration(self) -> None:
        self.stepped_by.clear()
        self._local.clear()
        self._averages.clear()

    def _add_averages(self, bucket: Bucket, memory: Tensor, factor: float) -> None:
        if not self._averages:
            return
        for number, offset in zip(bucket.numbers, bucket.offsets, strict=True):
            if number in self._averages:
                mark, average = self._averages[number]
                gradient, name = self._parameters.all[number].grad, self._parameters.names[number]
                if gradient is None or gradient.data_ptr() != mark[0]:
                    raise RuntimeError(_REPLACED.format(name=name))
                strides = self._parameters.strides[number]
                place = memory.as_strided(average.shape, strides, offset)
                place.add_(average, alpha=(self.group.size() - 1) * factor)


_REMEDY = "Call zero_grad() before the backward, or set shard_optimizer = False."

_ADDED = (
    "The gradient of {name} was changed after a backward whose gradients stay on this rank had "
    f"added to it, so nobody can tell how much of it is an average. {_REMEDY}"
)
_REPLACED = (
    "The gradient of {name}, an average, was replaced or cleared while a backward ran that adds to "
    f"it, so nobody can tell how often it counts in the sum. {_REMEDY}"
)
_HOOKED = (
    "{name} has a hook of yours behind the accumulation of its gradient, which is an average to "
    "which this backward adds, and the other ranks have no average. The hook would change another "
    f"sum there. {_REMEDY}"
)
_NOT_OWNED = (
    "{name} has a gradient that no backward has given it since the last average, and another rank "
    f"owns this parameter, so the gradient would be added a second time. {_REMEDY}"
)


def _mark(gradient: Tensor) -> _Mark:
    return gradient.data_ptr(), version_of_tensor(gradient)
