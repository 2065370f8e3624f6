"""Lets what one graph of a backward launches be on its way while the next ones compute.

A forward that is compiled in several graphs has a backward of several, and each waits at its end
for what it has launched: with nothing to compute beside the last bucket. While such a backward is
averaged, its modules' names stand for groups whose waits return at once. The real ones follow when
the backward has ended.

Until then nobody may read an average. A graph only passes views of its buckets on, and autograd
makes them ``.grad``. Where either has made a copy, it was made too early, and is made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.kept import give_back_kept
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.pieces import LaunchedPieces
from fusion_passes.ddp.standing_in import standing_in
from fusion_passes.torch_private import disable_dynamo
from fusion_passes.torch_private.autograd import after_backward
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.stand_ins import PostponingGroup


@dataclass
class _InFlight:
    """What the graphs of a module have launched in a backward, and nobody has waited for.

    Attributes:
        pieces: reads it.
    """

    pieces: LaunchedPieces
    _launched: list[tuple[Callable[[], None], list[tuple[int, Tensor]]]] = field(
        default_factory=list
    )

    @disable_dynamo
    def note(self, tensors: Sequence[Tensor], wait: Callable[[], None]) -> None:
        """Note a launch.

        Args:
            tensors: the bucket, or its gradients one by one.
            wait: returns when they hold the averages.
        """
        if not self._launched:
            after_backward(self.finish)
        self._launched.append((wait, self.pieces.of(tensors)))

    def finish(self) -> None:
        """Wait for all that was launched; from now on the gradients are averages."""
        launched, self._launched = self._launched, []
        for wait, _ in launched:
            wait()
        with torch.no_grad():
            for _, pieces in launched:
                for number, piece in pieces:
                    self._write(number, piece)
        give_back_kept(self.pieces.participant.module, has_averages=True)

    def _write(self, number: int, piece: Tensor) -> None:
        """Give a parameter its average, if ``.grad`` is not that itself. Flags have none."""
        usage = self.pieces.participant.usage
        if usage is not None and number == usage.flags:
            usage.note_flags(piece)
            return
        if usage is not None and number not in usage.reached:
            return  # Sent as zeros, by hand, where the average is kept.
        parameter = self.pieces.parameters[number]
        gradient = parameter.grad
        if gradient is not None and gradient.data_ptr() != piece.data_ptr():
            strides = self.pieces.module.strides_of(number)
            gradient.copy_(piece.as_strided(parameter.shape, strides))


@contextlib.contextmanager
def in_flight(
    ddp: DistributedDataParallel, participant: Participant, group: dist.ProcessGroup
) -> Iterator[dist.ProcessGroup]:
    """Around a backward of several graphs that average a module's gradients. Gives the group that
    the module's name stands for meanwhile.

    Args:
        ddp: the module.
        participant: the same.
        group: what the name stands for otherwise.
    """
    module = registry.module_of(ddp)
    mine = _InFlight(LaunchedPieces(participant, module, parameters_of(ddp)))
    if participant.usage is not None:
        participant.usage.is_postponed = True
    try:
        with standing_in(participant, PostponingGroup(group, mine.note), group) as postponing:
            yield postponing
            mine.finish()
    except BaseException:  # Another rank may never launch what this one would wait for.
        give_back_kept(module.group_name, has_averages=False)
        raise
    finally:
        if participant.usage is not None:
            participant.usage.is_postponed = False
