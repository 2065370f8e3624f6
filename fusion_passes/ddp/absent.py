"""Takes part, with zeros, in what other ranks launch in graphs that this rank's backward does not
have, where ranks may use other parameters in each step (``find_unused_parameters=True``).

A backward may consist of several graphs: of blocks that are compiled one by one, or where a graph
breaks. A rank that leaves out a block has no graph that launches its buckets. It launches them by
hand when its next graph comes, so that its own are where the other ranks expect them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.by_hand import Job
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unused import note_reach


def begin_reach(leaves: Iterable[Tensor]) -> list[Participant]:
    """As :func:`fusion_passes.ddp.unused.note_reach`; from now on these modules can send zeros."""
    reached = note_reach(leaves)
    for participant in reached:
        participant.launch_absent = _launch
    return reached


def _launch(participant: Participant, launches: LaunchList) -> Callable[[], None]:
    ddp = registry.ddp_of(participant.module)
    assert ddp is not None, "its backward runs"
    job = Job(ddp, registry.module_of(ddp), participant)
    with torch.no_grad():
        launched = [job.launch(item, launches.mode) for item in launches.collectives]

    def finish() -> None:
        for each in launched:
            each.finish()

    return finish


def finish_absent(participant: Participant) -> None:
    """Wait for what has been launched so, and keep the averages."""
    for finish in participant.absent:
        finish()
    participant.absent.clear()
