"""The next forward of a module whose last backward has failed.

Ranks that were not told may have launched what this rank has not. As with eager DDP, its next
forward is an error then: what it launches would pair up with theirs, the broadcast of buffers
first. Where the others have failed too, they and this rank go on, and meet before they launch.
"""

from __future__ import annotations

from typing import Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import shown_list
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unfinished import UNFINISHED, leave_error
from fusion_passes.torch_private.ddp import raise_as_ddp

_FAILED: Final = (
    "Expected to have finished reduction in the prior iteration before starting a new one. The "
    "last backward of this module has failed on this rank, and"
)

_REMEDY: Final = (
    "what this rank launches now could pair up with what they wait in until the process group's "
    "timeout. Let the error of a backward end the process, or catch it on all ranks, and go on "
    "when all of them have."
)


def note_failed(name: str) -> None:
    """After a round of a module has failed: leave its next forward an error, unless the other ranks
    meet this one before they launch."""
    ddp = registry.ddp_of(name)
    if ddp is not None and participants[name].failed_at and getattr(ddp, UNFINISHED) is None:
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
        others = participant.who_goes_on(waits=error == _FAILED)
        if others == []:
            leave_error(ddp, None)
            return
        who = "the store does not answer" if others is None else _not_on(others)
        error = f"{_FAILED} {who}: {_REMEDY}"
        leave_error(ddp, error)
    raise_as_ddp(ddp, RuntimeError, error)


def _not_on(others: list[int]) -> str:
    return f"not on rank {shown_list(map(str, others))}"
