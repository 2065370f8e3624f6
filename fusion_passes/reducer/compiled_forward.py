"""Where the backward of one compiled forward stores gradients, while the engine runs it."""

from __future__ import annotations

import itertools
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
"""The owner of a gradient: the reducer, and the number of the parameter there."""


@dataclass(frozen=True)
class Stored:
    """Gradients that a compiled backward stores together.

    Attributes:
        reducer: their reducer.
        numbers: the parameters.
        sizes: the number of elements of each gradient.
        contributions: how many compiled forwards contribute to each gradient; if several do, it is
            their sum.
    """

    reducer: Reducer
    numbers: Piece
    sizes: list[int]
    contributions: int


@dataclass
class Destinations:
    """Whose the gradients of one compiled forward are; the same in each iteration that reaches the
    same parameters.

    Attributes:
        owners: the owner of each input's gradient, by position.
        final: positions of the inputs to whose gradients only compiled forwards contribute.
        contributions: how many compiled forwards contribute to the gradient, by position.
        nodes: the AccumulateGrad nodes of the final inputs.
    """

    owners: Mapping[InputPosition, Gradient]
    final: frozenset[InputPosition]
    contributions: Mapping[InputPosition, int]
    nodes: Sequence[Any]
    _stored: dict[tuple[InputPosition, ...], Stored | None] = field(default_factory=dict)

    def of(self, positions: tuple[InputPosition, ...]) -> Stored | None:
        """The gradients at these positions, if they belong to one module, are final, and have
        equally many contributions; else ``None``."""
        if positions not in self._stored:
            self._stored[positions] = self._find(positions)
        return self._stored[positions]

    def _find(self, positions: tuple[InputPosition, ...]) -> Stored | None:
        if not self.final.issuperset(positions):
            return None
        owners = [self.owners[position] for position in positions]
        contributions = {self.contributions[position] for position in positions}
        reducer = owners[0][0]
        if len(contributions) > 1 or any(owner is not reducer for owner, _ in owners):
            return None
        numbers = tuple(number for _, number in owners)
        sizes = [reducer.parameters.kinds[number].numel for number in numbers]
        return Stored(reducer, numbers, sizes, contributions.pop())


@dataclass(frozen=True)
class _Begun:
    """A buffer handed to a running compiled backward and not marked ready yet.

    Attributes:
        stored: the gradients.
        offsets: the offset of each gradient, in elements.
        is_bucket: whether the buffer is a part of a bucket.
    """

    stored: Stored
    offsets: Sequence[Offset]
    is_bucket: bool

    def gradients(self, memory: Tensor) -> list[Tensor]:
        """Each gradient in the memory: ``[numel]``."""
        pairs = zip(self.offsets, self.stored.sizes, strict=True)
        return [memory[start : start + size] for start, size in pairs]


@dataclass
class CompiledForward:
    """A compiled forward that the running backward differentiates.

    Attributes:
        destinations: whose its gradients are.
        partial_sums: the parts that compiled backwards have given so far. All compiled forwards of
            one backward share this dictionary.
    """

    destinations: Destinations
    partial_sums: dict[Gradient, list[Tensor]]
    _begun: dict[tuple[InputPosition, ...], _Begun] = field(default_factory=dict)
    _accumulates: dict[int, bool] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the backward that runs the node of this forward accumulates the final gradients
        in ``.grad``. A node can run twice: in the backward that was walked, and in a nested one,
        when a hook calls ``torch.autograd.grad``. The nested backward returns its gradients."""
        backward = backward_id()
        if backward not in self._accumulates:
            self._accumulates[backward] = accumulates_in(self.destinations.nodes)
        return self._accumulates[backward]

    def give_memory(
        self,
        positions: Sequence[InputPosition],
        offsets: Sequence[Offset],
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """As :meth:`Reducer.part_of_bucket`. If the gradient is a sum, the graph that contributes
        last stores its part in the bucket, and the other parts are added there."""
        if not self.accumulates:
            return None
        key = tuple(positions)
        stored = self.destinations.of(key)
        if stored is None:
            self._note_not_stored(positions)
            return None
        reducer, numbers = stored.reducer, stored.numbers
        sizes = [end - start for start, end in itertools.pairwise([*offsets, numel])]
        if sizes != stored.sizes:
            reducer.note_no_memory(numbers, RENUMBERED)
            return None
        # A hook may have been registered since the backward was walked.
        reasons = reducer.why_not_stored(numbers)
        if reasons:
            for number in numbers:
                reducer.note_no_memory((number,), reasons.get(number, BESIDE))
            return None
        reducer.memory.note_existing(numbers)
        memory = None
        if self._is_last(stored):
            memory = reducer.part_of_bucket(numbers, offsets, numel, dtype)
        self._begun[key] = _Begun(stored, offsets, memory is not None)
        return memory

    def _note_not_stored(self, positions: Sequence[InputPosition]) -> None:
        known = self.destinations
        are_final = known.final.issuperset(positions)
        for position in known.owners.keys() & positions:
            reducer, number = known.owners[position]
            is_several = are_final and known.contributions[position] > 1
            reducer.note_no_memory((number,), SEVERAL if is_several else BESIDE)

    def _is_last(self, stored: Stored) -> bool:
        """Whether the other compiled forwards have contributed to these sums."""
        if stored.contributions == 1:
            return True
        parts = (self.partial_sums.get((stored.reducer, number), ()) for number in stored.numbers)
        return set(map(len, parts)) == {stored.contributions - 1}

    def mark_ready(
        self,
        memory: Tensor,
        positions: Sequence[InputPosition],
        copied: Sequence[InputPosition] = (),
        why: str = "",
    ) -> None:
        """Tell the reducer that the compiled backward of this forward has stored gradients in the
        memory that :meth:`give_memory` returned. It copied those at the positions ``copied``, for
        the reasons ``why``, joined by ``|``."""
        begun = self._begun.pop(tuple(positions), None) if self.accumulates else None
        if begun is None:
            return
        reducer, numbers = begun.stored.reducer, begun.stored.numbers
        with reducer.queue.lock:
            reducer.memory.join_streams()
        if not reducer.gives_memory:
            if reducer.is_expecting:
                reducer.assignment.observe(numbers)
            return
        is_sum = begun.stored.contributions > 1
        if is_sum:
            gradients = begun.gradients(memory)
            if not self._is_last(begun.stored):
                for number, part in zip(numbers, gradients, strict=True):
                    self.partial_sums.setdefault((reducer, number), []).append(part)
                return
            _add(gradients, [self.partial_sums.pop((reducer, number)) for number in numbers])
        if not begun.is_bucket:
            # Here and not in hooks, which run after the graph: a rank with another graph may store
            # these, and launch the bucket before the model's own collectives that come later.
            reducer.mark_stored(numbers, stored_apart=begun.gradients(memory))
            return
        copies = [self.destinations.owners[position][1] for position in copied]
        reducer.mark_stored(numbers, is_sum=is_sum, copied=copies, why=why)


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
