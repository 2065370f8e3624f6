"""The next forward of a module whose last backward has failed.

Ranks that were not told may have launched what this rank has not. As with eager DDP, its next
forward is an error then: what it launches would pair up with theirs, the broadcast of buffers
first. Where the others have failed too, they and this rank go on, and meet before they launch. A
group whose collective has failed runs no others.
"""

from __future__ import annotations

from typing import Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import shown_list
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unfinished import UNFINISHED, leave_error
from fusion_passes.torch_private.ddp import raise_as_ddp

_FAILED: Final = (
    "Expected to have finished reduction in the prior iteration before starting a new one. The "
    "last backward of this module has failed on this rank, and "
)

_BROKEN: Final = (
    "a collective of its process group has failed, after which backends run no others. End the "
    "process, or construct DistributedDataParallel anew over a new process group."
)

_REMEDY: Final = (
    "what this rank launches now could pair up with what they wait in until the process group's "
    "timeout. Let the error of a backward end the process, or catch it on all ranks, and go on "
    "when all of them have."
)


def note_failed(name: str) -> None:
    """After a round of a module has failed: leave its next forward an error, unless the other ranks
    meet this one before they launch."""
    ddp, participant = registry.ddp_of(name), participants[name]
    is_error = participant.is_broken or participant.failed_at
    if ddp is not None and is_error and getattr(ddp, UNFINISHED) is None:
        leave_error(ddp, _FAILED)


def refuse_unfinished(ddp: DistributedDataParallel) -> None:
    """Raise the error that the last backward has left for this forward, unless all ranks have had
    theirs.

    Raises:
        RuntimeError: as DDP's own reducer raises.
    """
    error = getattr(ddp, UNFINISHED)
    if error.startswith(_FAILED):
        participant = participants[registry.module_of(ddp).group_name]
        why = _why_not(participant, waits=error == _FAILED)
        error = f"{_FAILED}{why}" if why else None
        leave_error(ddp, error)
    if error is not None:
        raise_as_ddp(ddp, RuntimeError, error)


def _why_not(participant: Participant, *, waits: bool) -> str:
    """Why the module must not train any further; empty if it may."""
    if participant.is_broken:
        participant.leave_word(_BROKEN)  # Whoever has had another error comes to meet this rank.
        return _BROKEN
    others = participant.who_goes_on(waits=waits)
    if others == []:
        return ""
    if others is None:
        return f"the process group's store does not say whether on all: {_REMEDY}"
    return f"not on rank {shown_list(map(str, others))}: {_REMEDY}"
