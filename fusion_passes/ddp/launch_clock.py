"""Measures when the gradients of a module are ready in a few real steps, for the next start.

During a few backwards, the name that fused graphs have for a module's group stands for one that
notes when each bucket is launched, which is when its last gradient is there. Otherwise it stands
for the group itself, so that all further steps run what they always do.

No rank waits for another: each leaves its times in the group's store when it has them, and the last
one that does keeps the slowest rank's of each bucket in a file. The ranks agree on a file when a
module is constructed (:mod:`fusion_passes.ddp.costs`), so the next start plans from it. Where a
rank has ended, has died, or has other graphs, nothing is kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import Collective, LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import borrowed, participants
from fusion_passes.agreement.rendezvous import Meeting, asked, meeting_of
from fusion_passes.ddp.managed_module import let_stand_for
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.profile.records import Kind, Profile
from fusion_passes.profile.steps import MeasuredSteps, slowest_ready, store_steps
from fusion_passes.reductions.find import dtype_name
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import ProcessGroup
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.profiling import is_profiling
from fusion_passes.torch_private.stand_ins import PreparingGroup, StandInGroup, called_by

log = logging.getLogger(__name__)

FIRST_ROUND: Final = 2
"""Steps before it are not measured: they compile, and fill caches."""

STEPS: Final = 5
"""So many are measured; the median of each time counts."""

TRIED: Final = 40
"""After so many backwards that are no such steps, nothing is measured."""


@dataclass
class _Watched:
    """A module whose steps are measured.

    Attributes:
        name: the module's for its group.
        profile: of its ranks.
        path: of the file for what is measured.
        device: of its gradients.
        tried: how many backwards were looked at.
        launches: of the steps that were measured, as text.
        steps: of each, when it began and when each bucket was launched.
    """

    name: str
    profile: Profile
    path: Path
    device: torch.device
    tried: int = 0
    launches: str = ""
    steps: list[list[int | torch.Event]] = field(default_factory=list)
    _moments: list[int | torch.Event] = field(default_factory=list)
    _groups: tuple[ProcessGroup, PreparingGroup] | None = None
    _round: int = 0

    def begin(self) -> None:
        """Begin a backward."""
        self._round = participants[self.name].rounds
        self._moments.clear()

    def note_launches(self) -> None:
        """Begin to note the launches of a backward, if they are to be noted."""
        participant, ddp = participants[self.name], registry.ddp_of(self.name)
        if (
            ddp is None
            or participant.rounds < FIRST_ROUND
            or participant.kind
            or participant.received
            or participant.is_local
            or self.name in borrowed.names  # What is launched under it is another module's.
            or isinstance(registry.group_of(ddp), StandInGroup)
            or is_profiling()
        ):
            return
        self.tried += 1
        # What the name stands for in this backward may itself add kept gradients to what is sent.
        group = called_by(self.name)
        # Torch's table of names keeps neither.
        self._groups = group, PreparingGroup(group, lambda _: self._note())
        let_stand_for([self.name], self._groups[1])
        self._note()

    def _note(self) -> None:
        if self.device.type == "cpu":
            self._moments.append(time.perf_counter_ns())
        # What a CUDA graph has recorded cannot be read.
        elif self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            self._moments.append(event)

    def stop(self) -> None:
        """Stop noting launches."""
        groups, self._groups = self._groups, None
        participant = participants.get(self.name)
        # Names of a module whose collectives stay on this rank stand for another group already.
        if groups is not None and participant is not None and not participant.is_local:
            let_stand_for([self.name], groups[0])

    def end(self) -> None:
        """Keep what was noted, if all buckets of a step were launched."""
        participant = participants[self.name]
        text = _launches_of(participant)
        count = len(LaunchList.decode(text).collectives) if text else 0
        if participant.rounds != self._round + 1 or not count or len(self._moments) != count + 1:
            return
        if text != self.launches:
            self.launches, self.steps = text, []
        self.steps.append(list(self._moments))

    @property
    def is_done(self) -> bool:
        return len(self.steps) >= STEPS or self.tried >= TRIED

    def medians_ns(self) -> list[int]:
        """For each bucket, from the beginning of the backward to its launch."""
        for *_, last in self.steps:
            if isinstance(last, torch.Event):
                last.synchronize()
        since = [[_between_ns(first, other) for other in rest] for first, *rest in self.steps]
        return [round(statistics.median(times)) for times in zip(*since, strict=True)]


def _between_ns(begin: int | torch.Event, end: int | torch.Event) -> int:
    if isinstance(begin, int):
        assert isinstance(end, int), "all moments of a device are alike"
        return end - begin
    assert isinstance(end, torch.Event), "all moments of a device are alike"
    return round(begin.elapsed_time(end) * 1e6)


def _launches_of(participant: Participant) -> str:
    """What a round of a module launches, if one graph does all of it but for rows; else empty."""
    lists = [each for each in participant.history.get("", []) if each.buckets]
    return lists[0].encode() if len(lists) == 1 else ""


class LaunchClock:
    """The modules whose steps are measured."""

    def __init__(self) -> None:
        self._watched = weakref.WeakKeyDictionary[DistributedDataParallel, _Watched]()
        self._timed: list[_Watched] = []

    def watch(self, ddp: DistributedDataParallel, profile: Profile, path: Path) -> None:
        """Measure some steps of a module that has been constructed, as soon as there are any.

        Args:
            ddp: the module.
            profile: of its ranks.
            path: of the file for what is measured.
        """
        name, device = registry.module_of(ddp).group_name, parameters_of(ddp)[0].device
        self._watched[ddp] = _Watched(name, profile, path, device)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around a backward and what ends it."""
        if not self._watched or not is_main_thread():
            yield
            return
        self._timed = [item for item in self._watched.values() if self._is_there(item)]
        for item in self._timed:
            item.begin()
        try:
            yield
        finally:
            timed, self._timed = self._timed, []
            there = [item for item in timed if self._is_there(item)]
            for item in there:
                item.end()
        for item in there:
            ddp = registry.ddp_of(item.name)
            if item.is_done and ddp is not None:
                del self._watched[ddp]
                _keep(ddp, item)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around the backward itself, in which no other thread launches what this one does."""
        noted = self._timed if is_main_thread() else []
        for item in noted:
            item.note_launches()
        try:
            yield
        finally:
            for item in noted:
                item.stop()

    def _is_there(self, item: _Watched) -> bool:
        """Whether a module is still managed, on the group that it had."""
        ddp = registry.ddp_of(item.name)
        return (
            ddp is not None
            and self._watched.get(ddp) is item
            and registry.module_of(ddp).profile == item.profile
        )

    def reset(self) -> None:
        """Measure nothing."""
        self._watched.clear()
        self._timed = []


launch_clock: Final = process_state.keep(
    LaunchClock(),
    "the modules of which steps are measured, until some are",
    Lifetime.MODULE,
    reset=LaunchClock.reset,
)


def _keep(ddp: DistributedDataParallel, item: _Watched) -> None:
    """Leave this rank's times in the store; keep those of all, if this is the last one."""
    meeting = meeting_of(item.name)
    if meeting is None or len(item.steps) < STEPS:
        log.info("%s: no steps were measured", item.name)
        return
    statement = json.dumps([item.launches, item.medians_ns()])
    place = f"ddp_fusion/{participants[item.name].key}/steps"
    said = asked(lambda: leave(meeting, place, statement))
    if not said:
        return
    measured = _merged(ddp, item, said)
    known = registry.module_of(ddp).steps
    if measured is not None and (known is None or not known.agrees_with(measured)):
        store_steps(item.path, measured)
        log.info("%s: ready times of %s steps are kept in %s", item.name, STEPS, item.path)


def leave(meeting: Meeting, place: str, statement: str) -> dict[int, str]:
    """Leave something in the store, without waiting for anybody.

    Returns:
        What each rank has left, if this is the last one; else nothing.
    """
    store, ranks = meeting.store, range(meeting.world_size)
    store.set(f"{place}/{meeting.rank}", statement)
    if store.add(f"{place}/arrived", 1) != meeting.world_size:
        return {}
    said = {rank: store.get(f"{place}/{rank}").decode() for rank in ranks}
    for name in ("arrived", *map(str, ranks)):
        with contextlib.suppress(RuntimeError):  # Not every store can delete.
            store.delete_key(f"{place}/{name}")
    return said


def _merged(
    ddp: DistributedDataParallel, item: _Watched, said: Mapping[int, str]
) -> MeasuredSteps | None:
    """What all ranks have measured; ``None`` where they have launched something else."""
    values = [json.loads(text) for text in said.values()]
    if any(launches != item.launches for launches, _ in values):
        log.info("%s: the ranks have measured steps of other graphs", item.name)
        return None
    collectives = LaunchList.decode(item.launches).collectives
    costs = [_cost_ns(ddp, item.profile, one) for one in collectives]
    times = slowest_ready([ns for _, ns in values], costs, item.profile.rates.taken_per_mille)
    return MeasuredSteps(STEPS, tuple(one.parameters for one in collectives), times)


def _cost_ns(ddp: DistributedDataParallel, profile: Profile, sent: Collective) -> int:
    """What an all-reduce of some parameters' gradients costs."""
    dtype: torch.dtype = getattr(torch, sent.dtype)
    parameters = parameters_of(ddp)
    # A number beyond is that of what says which parameters were used: one element of each.
    elements = [parameters[n].numel() if n < len(parameters) else n for n in sent.parameters]
    kind = Kind(dtype_name(dtype.to_real()), "avg" if sent.divided == "by" else "sum")
    return profile.table(kind).cost_ns(sum(elements) * dtype.itemsize)
