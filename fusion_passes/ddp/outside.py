"""Reduces gradients that come from outside of compiled graphs while the backward goes on.

A backward whose graphs average a module may also reach parameters that no graph reads: of a layer
that is not compiled. As DDP's own reducer does, buckets of these are launched when their last
gradient has come. Ranks agree on each as on what a graph launches, so it matches what the others
launch in its place, or is left to the end of the backward. Where ranks may use others, a bucket
says which parameters this one has used, as a graph does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

import torch

from fusion_passes.agreement.launches import LATE, Collective, LaunchList
from fusion_passes.ddp.by_hand import Job
from fusion_passes.ddp.late import planned_by_hand
from fusion_passes.graph.collectives import WAIT
from fusion_passes.state import Lifetime, process_state


class _Buckets:
    """What is launched by hand in a backward.

    Args:
        job: the module.
        numbers: of the parameters.
    """

    def __init__(self, job: Job, numbers: Collection[int]) -> None:
        self._job = job
        usage = job.participant.usage
        flags = frozenset[int]() if usage is None else frozenset({usage.flags})
        lists = [self._list(item, flags) for item in planned_by_hand(job, numbers).collectives]
        self._list_of = {n: item for item in lists for n in item.parameters - flags}
        self._missing = {item: len(item.parameters - flags) for item in lists}

    def _list(self, bucket: Collective, flags: frozenset[int]) -> LaunchList:
        if not flags:
            return LaunchList(LATE, (replace(bucket, place=0),))
        return planned_by_hand(self._job, flags.union(bucket.parameters))

    def came(self, number: int) -> None:
        launches = self._list_of.pop(number, None)
        if launches is not None:
            self._missing[launches] -= 1
            if not self._missing[launches]:
                self._launch(launches)

    def _launch(self, launches: LaunchList) -> None:
        participant = self._job.participant
        if not participant.agrees_to(launches):
            return
        with torch.no_grad():
            for item in launches.collectives:
                for piece in self._job.launch(item, LATE).pieces:
                    WAIT(piece)  # Returns at once: the real wait is at the end of the backward.
        for number in launches.parameters:
            participant.late.pop(number, None)


_buckets: Final = process_state.keep(
    dict[str, _Buckets](),
    "the gradients from outside of compiled graphs in the backward that runs, by module",
    Lifetime.CALL,
    reset=dict.clear,
)


def note_outside(module: str, number: int) -> None:
    """Note that a gradient has come that no graph has reduced, in the backward that runs.

    Args:
        module: the DDP module's name for its group.
        number: the parameter's.
    """
    found = _buckets.get(module)
    if found is not None:
        found.came(number)


@contextlib.contextmanager
def reducing_outside(job: Job, numbers: Collection[int]) -> Iterator[None]:
    """Around a backward in which a module gets gradients from outside of the graphs that average
    it. What is launched must be waited for, and given to the parameters, as what graphs launch
    (:func:`fusion_passes.ddp.in_flight.in_flight`).

    Args:
        job: the module.
        numbers: of these parameters.
    """
    if not numbers:
        yield
        return
    _buckets[job.participant.module] = _Buckets(job, numbers)
    try:
        yield
    finally:
        del _buckets[job.participant.module]
