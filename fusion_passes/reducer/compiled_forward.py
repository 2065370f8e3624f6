"""Where the backward of one compiled forward stores gradients, while the engine runs it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fusion_passes.layout.layout import Piece
from fusion_passes.reducer.copies import BESIDE, RENUMBERED, SEVERAL
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.torch_private.autograd import accumulates_in, backward_id, running_node

Gradient: TypeAlias = tuple[Reducer, int]
"""The owner of a gradient: the reducer, and the number of the parameter there."""


@dataclass(frozen=True)
class _Begun:
    """A buffer handed to a running compiled backward and not marked ready yet.

    Attributes:
        reducer: the reducer of the gradients.
        numbers: the parameters.
        offsets: the offset of each gradient, in elements.
        is_sum: whether other compiled forwards contribute to these gradients.
        is_bucket: whether the buffer is a part of a bucket.
    """

    reducer: Reducer
    numbers: Piece
    offsets: Sequence[int]
    is_sum: bool
    is_bucket: bool

    def gradients(self, memory: Tensor) -> list[Tensor]:
        """Each gradient in the memory: ``[numel]``."""
        sizes = (self.reducer.parameters.kinds[number].numel for number in self.numbers)
        return [memory[a : a + size] for a, size in zip(self.offsets, sizes, strict=True)]


@dataclass
class CompiledForward:
    """A compiled forward that the running backward differentiates. A position is the index of a
    tensor among the forward's tensor inputs, which is also the index of its edge in the
    ``next_functions`` of the forward's autograd node.

    Attributes:
        owners: the owner of each input's gradient, by position.
        final: positions of the inputs to whose gradients only compiled forwards contribute.
        contributions: how many compiled forwards contribute to the gradient, by position; if
            several do, the gradient is their sum.
        partial_sums: the parts that compiled backwards have given so far. All compiled forwards of
            one backward share this dictionary.
    """

    owners: Mapping[int, Gradient]
    final: frozenset[int]
    contributions: Mapping[int, int]
    partial_sums: dict[Gradient, list[Tensor]]
    _begun: dict[tuple[int, ...], _Begun] = field(default_factory=dict)
    _accumulates: dict[int, bool] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the backward that runs the node of this forward accumulates the final gradients
        in ``.grad``. A node can run twice: in the backward that was walked, and in a nested one,
        when a hook calls ``torch.autograd.grad``. The nested backward returns its gradients."""
        backward = backward_id()
        if backward not in self._accumulates:
            edges = running_node().next_functions
            nodes = (edges[position][0] for position in self.final)
            self._accumulates[backward] = all(map(accumulates_in, nodes))
        return self._accumulates[backward]

    def _of(self, positions: Sequence[int]) -> tuple[Reducer, Piece] | None:
        """The reducer and the parameters of these positions, if the gradients belong to one module,
        are final, and have equally many contributions; else ``None``."""
        if not self.final.issuperset(positions):
            return None
        owners = [self.owners[position] for position in positions]
        reducer = owners[0][0]
        if any(owner is not reducer for owner, _ in owners):
            return None
        if len({self.contributions[position] for position in positions}) > 1:
            return None
        return reducer, tuple(number for _, number in owners)

    def give_memory(
        self, positions: Sequence[int], offsets: Sequence[int], numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """As :meth:`Reducer.part_of_bucket`. If the gradient is a sum, the graph that contributes
        last stores its part in the bucket, and the other parts are added there."""
        if not self.accumulates:
            return None
        found = self._of(positions)
        if found is None:
            are_final = self.final.issuperset(positions)
            for position in self.owners.keys() & positions:
                reducer, number = self.owners[position]
                is_several = are_final and self.contributions[position] > 1
                reducer.note_no_memory((number,), SEVERAL if is_several else BESIDE)
            return None
        reducer, numbers = found
        sizes = [end - start for start, end in itertools.pairwise([*offsets, numel])]
        if sizes != [reducer.parameters.kinds[number].numel for number in numbers]:
            reducer.note_no_memory(numbers, RENUMBERED)
            return None
        # A hook may have been registered since the backward was walked.
        reasons = {number: reducer.why_not_stored(number) for number in numbers}
        if any(reasons.values()):
            for number, why in reasons.items():
                reducer.note_no_memory((number,), why or BESIDE)
            return None
        is_sum = self.contributions[positions[0]] > 1
        memory = None
        if not is_sum or self._is_last(reducer, numbers, positions):
            memory = reducer.part_of_bucket(numbers, offsets, numel, dtype)
        begun = _Begun(reducer, numbers, offsets, is_sum, memory is not None)
        self._begun[tuple(positions)] = begun
        return memory

    def _is_last(self, reducer: Reducer, numbers: Piece, positions: Sequence[int]) -> bool:
        """Whether the other compiled forwards have contributed to these sums."""
        found = {len(self.partial_sums.get((reducer, number), ())) for number in numbers}
        return found == {self.contributions[positions[0]] - 1}

    def mark_ready(
        self, memory: Tensor, positions: Sequence[int], copied: Sequence[int] = (), why: str = ""
    ) -> None:
        """Tell the reducer that the compiled backward of this forward has stored gradients in the
        memory that :meth:`give_memory` returned. It copied those at the positions ``copied``, for
        the reasons ``why``, joined by ``|``."""
        begun = self._begun.pop(tuple(positions), None) if self.accumulates else None
        if begun is None:
            return
        reducer, numbers = begun.reducer, begun.numbers
        with reducer.queue.lock:
            reducer.memory.join_streams()
        if not reducer.gives_memory:
            if reducer.is_expecting:
                reducer.assignment.observe(numbers)
            return
        if begun.is_sum:
            gradients = begun.gradients(memory)
            if not self._is_last(reducer, numbers, positions):
                for number, part in zip(numbers, gradients, strict=True):
                    self.partial_sums.setdefault((reducer, number), []).append(part)
                return
            _add(gradients, [self.partial_sums.pop((reducer, number)) for number in numbers])
        if not begun.is_bucket:
            # Here and not in hooks, which run after the graph: a rank with another graph may store
            # these, and launch the bucket before the model's own collectives that come later.
            reducer.mark_stored(numbers, stored_apart=begun.gradients(memory))
            return
        copied = [self.owners[position][1] for position in copied]
        reducer.mark_stored(numbers, is_sum=begun.is_sum, copied=copied, why=why)


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
