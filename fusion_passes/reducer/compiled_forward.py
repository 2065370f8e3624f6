"""Where the backward of one compiled forward stores gradients, while the engine runs it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusion_passes.layout.layout import InputPosition, Offset, ParameterNumber, Piece
from fusion_passes.reducer.copies import BESIDE, RENUMBERED, SEVERAL
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.torch_private.autograd import accumulates_in, backward_id

Gradient: TypeAlias = tuple[Reducer, ParameterNumber]
"""A gradient that is averaged: the reducer, and the number of the parameter there."""


@dataclass(frozen=True)
class Stored:
    """Gradients that a compiled backward stores together in one buffer.

    Attributes:
        reducer: their reducer.
        numbers: the parameters.
        offsets: the offset of each gradient in the buffer, in elements.
        numel: the number of elements of the buffer.
        contributions: how many compiled forwards contribute to each gradient; if several do, it is
            their sum.
    """

    reducer: Reducer
    numbers: Piece
    offsets: tuple[Offset, ...]
    numel: int
    contributions: int

    @property
    def has_sizes_of_parameters(self) -> bool:
        """Whether each gradient has as many elements as its parameter."""
        kinds = self.reducer.parameters.kinds
        sizes = [end - start for start, end in itertools.pairwise([*self.offsets, self.numel])]
        return sizes == [kinds[number].numel for number in self.numbers]

    def gradients(self, buffer: Tensor) -> list[Tensor]:
        """Each gradient in the buffer: ``[numel]``."""
        ends = itertools.pairwise([*self.offsets, self.numel])
        return [buffer[start:end] for start, end in ends]


@dataclass
class Destinations:
    """Whose the gradients of one compiled forward are; the same in each iteration that reaches the
    same parameters.

    Attributes:
        gradients: the gradient of each input, by position.
        final: positions of the inputs to whose gradients only compiled forwards contribute.
        contributions: how many compiled forwards contribute to the gradient, by position.
        nodes: the AccumulateGrad nodes of the final inputs.
    """

    gradients: Mapping[InputPosition, Gradient]
    final: frozenset[InputPosition]
    contributions: Mapping[InputPosition, int]
    nodes: Sequence[Any]
    _stored: dict[tuple[Any, ...], tuple[Stored | None, str]] = field(default_factory=dict)

    def of(self, positions: str, offsets: str, numel: int) -> tuple[Stored | None, str]:
        """The gradients at these positions, which lie at these offsets in a buffer, if one buffer
        can hold them; else ``None``, and the reason. Positions and offsets are lists in JSON."""
        key = positions, offsets, numel
        if key not in self._stored:
            numbers, starts = tuple(json.loads(positions)), tuple(json.loads(offsets))
            self._stored[key] = self._find(numbers, starts, numel)
        return self._stored[key]

    def _find(
        self, positions: tuple[InputPosition, ...], offsets: tuple[Offset, ...], numel: int
    ) -> tuple[Stored | None, str]:
        if not self.final.issuperset(positions):
            return None, BESIDE
        gradients = [self.gradients[position] for position in positions]
        contributions = {self.contributions[position] for position in positions}
        reducer = gradients[0][0]
        if len(contributions) > 1 or any(each is not reducer for each, _ in gradients):
            return None, SEVERAL
        numbers = tuple(number for _, number in gradients)
        stored = Stored(reducer, numbers, offsets, numel, contributions.pop())
        return (stored, "") if stored.has_sizes_of_parameters else (None, RENUMBERED)


@dataclass
class CompiledForward:
    """A compiled forward that the running backward differentiates.

    Attributes:
        destinations: whose its gradients are.
        partial_sums: the parts that compiled backwards have given so far. All compiled forwards of
            one backward share this dictionary.
        begun: the buffers handed to the running compiled backward and not marked ready yet, by
            positions: their gradients, and whether the buffer is a part of a bucket.
    """

    destinations: Destinations
    partial_sums: dict[Gradient, list[Tensor]]
    begun: dict[str, tuple[Stored, bool]] = field(default_factory=dict)
    _accumulates: dict[int, bool] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the backward that runs the node of this forward accumulates the final gradients
        in ``.grad``. A node can run twice: in the backward that was walked, and in a nested one,
        when a hook calls ``torch.autograd.grad``. The nested backward returns its gradients.

        One gradient tells for all, since torch takes a microsecond for each: a nested backward that
        accumulates only some (``inputs``) is refused in any case, because the backward that was
        walked accumulates them again."""
        backward = backward_id()
        if backward not in self._accumulates:
            self._accumulates[backward] = accumulates_in(self.destinations.nodes[:1])
        return self._accumulates[backward]

    def give_memory(
        self, positions: str, offsets: str, numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """As :meth:`Iteration.part_of_bucket`; positions and offsets as for
        :meth:`Destinations.of`. If the gradient is a sum, the graph that contributes last stores
        its part in the bucket, and the other parts are added there."""
        if not self.accumulates:
            return None
        stored, why = self.destinations.of(positions, offsets, numel)
        if stored is None:
            for position in self.destinations.gradients.keys() & json.loads(positions):
                reducer, number = self.destinations.gradients[position]
                is_single = why == SEVERAL and self.destinations.contributions[position] == 1
                _note_no_memory(reducer, number, BESIDE if is_single else why)
            return None
        reducer, numbers = stored.reducer, stored.numbers
        # A hook may have been registered since the backward was walked.
        reasons = reducer.hooks.why_not_stored(numbers)
        if reasons:
            for number in numbers:
                _note_no_memory(reducer, number, reasons.get(number, BESIDE))
            return None
        reducer.memory.note_existing(numbers)
        memory = None
        if reducer.iteration is not None and self._is_last(stored):
            memory = reducer.iteration.part_of_bucket(numbers, stored.offsets, numel, dtype)
        self.begun[positions] = stored, memory is not None
        return memory

    def _is_last(self, stored: Stored) -> bool:
        """Whether the other compiled forwards have contributed to these sums."""
        if stored.contributions == 1:
            return True
        parts = (self.partial_sums.get((stored.reducer, number), ()) for number in stored.numbers)
        return set(map(len, parts)) == {stored.contributions - 1}

    def mark_ready(
        self,
        memory: Tensor,
        positions: str,
        copied: Sequence[InputPosition] = (),
        why: str = "",
    ) -> None:
        """Tell the reducer that the compiled backward of this forward has stored gradients in the
        memory that :meth:`give_memory` returned. It copied those at the positions ``copied``, for
        the reasons ``why``, joined by ``|``."""
        begun = self.begun.pop(positions, None) if self.accumulates else None
        if begun is None:
            return
        stored, is_bucket = begun
        reducer, numbers, now = stored.reducer, stored.numbers, stored.reducer.iteration
        if now is None:
            return
        with reducer.queue.lock:
            reducer.memory.join_streams()
        if not now.gives_memory:
            reducer.assignment.observe(numbers)
            return
        is_sum = stored.contributions > 1
        if is_sum:
            gradients = stored.gradients(memory)
            if not self._is_last(stored):
                for number, part in zip(numbers, gradients, strict=True):
                    self.partial_sums.setdefault((reducer, number), []).append(part)
                return
            _add(gradients, [self.partial_sums.pop((reducer, number)) for number in numbers])
        if not is_bucket:
            # Here and not in hooks, which run after the graph: a rank with another graph may store
            # these, and launch the bucket before the model's own collectives that come later.
            now.mark_stored(numbers, stored_apart=stored.gradients(memory))
            return
        copies = [self.destinations.gradients[position][1] for position in copied]
        now.mark_stored(numbers, is_sum=is_sum, copied=copies, why=why)


def _note_no_memory(reducer: Reducer, number: ParameterNumber, why: str) -> None:
    if reducer.iteration is not None:
        reducer.iteration.note_no_memory((number,), why)


def _add(gradients: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Add the earlier parts of each sum to the last part, in autograd's order. Autograd computes
    the same sum apart from the bucket; :meth:`BucketMemory.alias` sets ``.grad`` to the bucket
    view."""
    first, *others = map(list, zip(*parts, strict=True))
    for part in itertools.chain(first, *others):
        if part.device.type != "cpu":  # It may be of another stream's memory.
            part.record_stream(torch.accelerator.current_stream(part.device))
    with torch.no_grad():
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_add_(list(gradients), first)
