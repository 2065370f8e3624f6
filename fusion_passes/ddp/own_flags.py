"""The flags of blocks and instances that share a compiled forward, where ranks may use other
parameters in each step (``find_unused_parameters=True``).

The flags that a graph sends are constants of it: they name the parameters for which it was
compiled. Where it runs for others, they are written anew, in the bucket, just before it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.pieces import LaunchedPieces
from fusion_passes.ddp.standing_in import standing_in
from fusion_passes.torch_private import disable_dynamo
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.stand_ins import PreparingGroup


@contextlib.contextmanager
def writing_own_flags(
    ddp: DistributedDataParallel, participant: Participant, group: dist.ProcessGroup
) -> Iterator[dist.ProcessGroup]:
    """Around a backward whose graphs may have the flags of other parameters. Gives the group that
    the module's name stands for meanwhile.

    Args:
        ddp: the module; ranks may use others of its parameters in each step.
        participant: the same.
        group: what the name stands for otherwise.
    """
    module, usage = registry.module_of(ddp), participant.usage
    assert usage is not None, "it has flags"
    launched = LaunchedPieces(participant, module, parameters_of(ddp))

    @disable_dynamo
    def write(tensors: Sequence[Tensor]) -> None:
        for number, piece in launched.of(tensors):
            if number == usage.flags:
                sent = participant.agreed[participant.position - 1].parameters & usage.reached
                # Whether they are divided before does not matter: all that is asked is if any is 1.
                flags = torch.tensor(usage.flags_of(sent), dtype=piece.dtype)
                piece.copy_(flags, non_blocking=True)

    with standing_in(participant, PreparingGroup(group, write), group) as writing:
        yield writing
