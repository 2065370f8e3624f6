"""Marks the gradients of one iteration ready. A gradient is *ready* once it lies in its bucket; it
gets there from the compiled backward that stores it, or from ``.grad``, out of which it is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from fusion_passes.layout.layout import Offset, ParameterNumber, Piece
from fusion_passes.reducer.assignment import BucketAssignment
from fusion_passes.reducer.averaged_module import AveragedModule
from fusion_passes.reducer.copies import COMPLEX, CONVERTED, OTHER_PIECES, UNALIGNED, Copies
from fusion_passes.reducer.errors import late_hook, repeated_gradients
from fusion_passes.reducer.hooks import ParameterHooks
from fusion_passes.reducer.launch_queue import LaunchQueue
from fusion_passes.reducer.memory import BucketMemory
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.used_parameters import AllUsed
from fusion_passes.torch_private.autograd import tensor_in

_ALIGNED_BYTES: Final = 16
"""The alignment that generated code assumes for the memory that an operator returns."""


@dataclass(eq=False)
class Iteration:
    """The gradients of one iteration: from the first backward after a forward that is averaged to
    the last gradient that the reducer expects. Parameters are given by number.

    Attributes:
        received: parameters whose gradient was received.
        unused: parameters that get no gradient in this iteration, as far as this rank knows.
        has_marked_unused: whether the unused parameters have been marked ready.
        accumulated_apart: parameters that a graph marked ready, and whose gradient autograd
            accumulates outside the bucket (sums over several graphs, copied gradients); their hook
            lets ``.grad`` be the bucket view.
        copies: how each gradient reached its bucket.
    """

    _module: AveragedModule
    _parameters: Parameters
    _assignment: BucketAssignment
    _memory: BucketMemory
    _queue: LaunchQueue
    _used: AllUsed
    _hooks: ParameterHooks
    unused: set[ParameterNumber]
    received: set[ParameterNumber] = field(default_factory=set)
    has_marked_unused: bool = False
    accumulated_apart: set[ParameterNumber] = field(default_factory=set)
    copies: Copies = field(default_factory=Copies)

    @property
    def gives_memory(self) -> bool:
        """Whether compiled backwards store into the buckets now."""
        is_fixed = self._assignment.is_fixed and not self._used.launches_after_backward
        return is_fixed and not self._module.is_idle

    @property
    def awaits_hooks(self) -> bool:
        """Whether autograd has yet to accumulate a gradient that a graph has marked ready."""
        return bool(self._hooks.awaited or self.accumulated_apart)

    @property
    def missing(self) -> set[ParameterNumber]:
        """The parameters whose gradient has yet to be received."""
        known = self.received | self.unused | self._parameters.delayed
        return set(self._parameters.numbers - known)

    # --- Gradients that a graph stores -----------------------------------------------------------

    def part_of_bucket(
        self, numbers: Piece, offsets: tuple[Offset, ...], numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the part of a bucket, ``[numel]``, in which a graph stores the gradients of these
        parameters, each at its offset in elements.

        Returns ``None`` if the layout places the gradients differently, if the bucket has another
        dtype (the module was converted), if the gradients are not averaged, or if the part is not
        aligned as generated code assumes, or is complex and does not begin the bucket: the graph
        then calls ``aten.as_strided``, whose offset counts from the start of the storage."""
        if not self.gives_memory:
            return None
        layout = self._assignment.layout
        bucket, start = layout.buckets[layout.places[numbers[0]][0]], layout.start(numbers, offsets)
        if bucket.dtype != dtype:
            self.copies.note_no_memory(numbers, CONVERTED)
            return None
        if start is None or start * dtype.itemsize % _ALIGNED_BYTES:
            self.copies.note_no_memory(numbers, OTHER_PIECES if start is None else UNALIGNED)
            return None
        with self._queue.lock:
            memory = self._memory.of(bucket)
            # The graph may store on another stream than it was allocated on.
            self._memory.join_streams()
        part = tensor_in(memory, (numel,), (1,), start)
        if dtype.is_complex and part.storage_offset():
            self.copies.note_no_memory(numbers, COMPLEX)
            return None
        return part

    def note_no_memory(self, numbers: Collection[ParameterNumber], why: str) -> None:
        """Record why a graph gets no memory of a bucket for these gradients."""
        self.copies.note_no_memory(numbers, why)
        self._memory.note_existing([n for n in numbers if n not in self.received])

    def mark_stored(
        self,
        numbers: Piece,
        *,
        is_sum: bool = False,
        stored_apart: Sequence[Tensor] | None = None,
        copied: Sequence[ParameterNumber] = (),
        why: str = "",
    ) -> None:
        """Mark gradients ready that a graph has stored in the memory that it was given.

        Args:
            numbers: the parameters.
            is_sum: whether other graphs contributed to these gradients; the sum is stored already.
            stored_apart: the gradients, ``[numel]`` each, if the graph was given memory of its own;
                they are copied into the bucket.
            copied: those of the numbers whose gradient the graph may have copied to its place.
            why: the reasons for these copies, joined by ``|``; an empty one if the gradient was not
                copied.
        """
        if copied:
            self.copies.in_graphs.append((copied, why))
        with self._queue.lock:
            self._used.note(numbers)
            self._used.count_stored(numbers)
            members = frozenset(numbers)  # It is added to other sets in a fraction of the time.
            self._refuse_repeated(members)
            if stored_apart is None:
                self.copies.stored.update(members)
            else:
                self._memory.copy_flat(numbers, stored_apart)
            is_apart = is_sum or stored_apart is not None
            (self.accumulated_apart if is_apart else self._hooks.awaited).update(members)
            self._memory.add_existing(numbers)
            self.received.update(members)
            self._mark_ready(numbers)

    # --- Gradients that are copied ---------------------------------------------------------------

    def has_accumulated(self, number: ParameterNumber) -> bool:
        """Whether a gradient that autograd has just accumulated was marked ready by a graph; then
        nothing is left to do for it."""
        is_apart = number in self.accumulated_apart
        if not is_apart and number not in self._hooks.awaited:
            return False
        if self._hooks.why_not_stored((number,)):
            self._module.refuse(late_hook(self._parameters.names[number], self._module.label))
        if is_apart:
            self.accumulated_apart.discard(number)
            self._memory.alias(number)
        self._hooks.awaited.discard(number)
        return True

    def receive(self, number: ParameterNumber) -> None:
        """Mark a gradient ready that no graph has stored, once it is complete."""
        if number in self._parameters.delayed:
            self.received.add(number)
            return
        if not self._used.count(number, is_first=number not in self.received):
            return
        self._refuse_repeated((number,))
        self.received.add(number)
        self._assignment.observe((number,))
        if self._used.launches_after_backward:
            return
        self._memory.join_streams()
        self.copy_in(number)
        self._mark_ready((number,))

    def copy_in(self, number: ParameterNumber) -> None:
        """Copy ``.grad`` into the bucket, and let it be the bucket view. If hooks of others behind
        this one read it, it stays where it is: they must see the gradient of this rank."""
        self._memory.copy_in(number, lets_alias=not self._hooks.why_hooked(number))

    def receive_delayed(self) -> None:
        """Mark the delayed gradients ready, which are complete, or get zeros."""
        for number in self._parameters.delayed:
            self.copy_in(number)
            self._mark_ready((number,))

    def mark_missing_unused(self) -> None:
        """Mark the parameters unused whose gradient was not received."""
        self.unused, self.has_marked_unused = self.missing, False
        self._mark_ready(())

    def _mark_ready(self, numbers: Piece) -> None:
        """Mark gradients ready, and launch buckets that are full. As in DDP, the unused parameters
        are marked ready when the first gradient of the iteration is, with zeros or their existing
        ``.grad``: not earlier, because a backward may launch collectives of its own before its
        first gradient."""
        if not self.has_marked_unused:
            self.has_marked_unused = True
            for number in sorted(self.unused - self.received - self._parameters.delayed):
                self.copy_in(number)
                self._queue.mark_ready((number,))
        self._queue.mark_ready(numbers)
        self._queue.launch_ready()

    def _refuse_repeated(self, numbers: Collection[ParameterNumber]) -> None:
        repeated = self.received.intersection(numbers)
        if self.has_marked_unused:
            # Reentrant checkpointing, for example, which the walk does not see.
            repeated |= self.unused.intersection(numbers)
        if repeated:
            label = self._module.label
            self._module.refuse(repeated_gradients(self._parameters, label, repeated))

    def await_no_hook(self) -> None:
        """Await no hook any more: the engine has run."""
        self._hooks.awaited.clear()
        self.accumulated_apart.clear()
