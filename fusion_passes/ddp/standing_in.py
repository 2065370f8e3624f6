"""Lets a module's name for its group stand for another group while a backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.managed_module import let_stand_for


@contextlib.contextmanager
def standing_in(
    participant: Participant, stand_in: dist.ProcessGroup, group: dist.ProcessGroup
) -> Iterator[dist.ProcessGroup]:
    """Around a part of a backward; gives the group that the name stands for meanwhile.

    Args:
        participant: the module.
        stand_in: that group.
        group: what the name stands for otherwise.
    """
    names = [participant.module]
    let_stand_for(names, stand_in)
    try:
        yield stand_in
    finally:
        if not participant.is_local:  # Else it stays so until the backward has ended.
            let_stand_for(names, group)
