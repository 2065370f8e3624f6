"""Tells whose gradients lie where in what a module launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fusion_passes.agreement.launches import Collective
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import LaunchCounter
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.plan.layout import as_it_lies, lay_out


@dataclass
class LaunchedPieces:
    """Reads what the graphs of a module launch, one bucket after the other.

    Attributes:
        participant: the module among those of the other ranks, which knows what is launched next.
        module: the same.
        parameters: all of it.
    """

    participant: Participant
    module: ManagedModule
    parameters: Sequence[nn.Parameter]
    _counter: LaunchCounter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._counter = LaunchCounter(self.participant.module)

    def of(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Each gradient of the bucket that is launched now, with its parameter's number: a view
        ``[numel]`` of the gradient as it lies there, in the strides in which it is sent.

        Args:
            tensors: the bucket, or its gradients one by one.
        """
        flat = [as_it_lies(tensor, tensor.stride()).reshape(-1) for tensor in tensors]
        if not any(piece.numel() for piece in flat):
            return []
        numbers = [number for number in self._next().parameters if self._numel(number)]
        numels = list(map(self._numel, numbers))
        if len(flat) > 1 or len(numels) == 1:
            return list(zip(numbers, (piece for piece in flat if piece.numel()), strict=True))
        places = lay_out(numels, [(1,)] * len(numels), flat[0].element_size())
        return [
            (number, flat[0][place.offset : place.offset + numel])
            for number, numel, place in zip(numbers, numels, places, strict=True)
        ]

    def _next(self) -> Collective:
        """What is launched now, of what the graph that runs has announced."""
        launches = self.participant.agreed[self.participant.position - 1]
        filled = [item for item in launches.collectives if any(map(self._numel, item.parameters))]
        return filled[self._counter.next()]

    def _numel(self, number: int) -> int:
        """Count the elements of what is sent under a number."""
        is_flags = number == self.module.flags
        return self.module.flag_count if is_flags else self.parameters[number].numel()
