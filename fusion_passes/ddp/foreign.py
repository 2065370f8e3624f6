"""Foreign collectives: those that are not DDP's, on a module's process group, while it trains. A
``SyncBatchNorm`` has one in its forward and one in its backward.

They pair up with those of other ranks in the order in which each rank issues them, as DDP's do. So
where ranks may leave out parts of a model (``find_unused_parameters=True``), and a part that is
left out is reached at once, nothing of DDP's may lie between them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.agreement.usage import Usage
from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private.groups import collectives_issued


def begin_forward(ddp: DistributedDataParallel) -> None:
    """Note where a forward begins, as long as nobody knows whether the backward has foreign
    collectives."""
    for participant, usage in _unknown(ddp):
        usage.issued = collectives_issued(participant.process_group)


def end_forward(ddp: DistributedDataParallel) -> None:
    """Note whether a forward has issued foreign collectives: all that it has."""
    for participant, usage in _unknown(ddp):
        if usage.issued is not None:
            issued = collectives_issued(participant.process_group)
            usage.suspects_foreign |= issued != usage.issued
            usage.issued = None


def _unknown(ddp: DistributedDataParallel) -> Iterator[tuple[Participant, Usage]]:
    """The module, if it may lack gradients and nobody knows. The package may have been reset since
    it was constructed."""
    for participant in list(participants.values()):
        usage = participant.usage
        if usage is None or usage.has_foreign is not None:
            continue
        if registry.ddp_of(participant.module) is ddp:
            yield participant, usage
