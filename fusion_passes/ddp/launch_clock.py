"""Measures when the gradients of a module are ready in a few real steps, to plan its buckets once
more.

During a few backwards, the name that fused graphs have for a module's group stands for one that
notes when each bucket is launched, which is when its last gradient is there. Otherwise it stands
for the group itself, so that all further steps run what they always do.

After a number of rounds that is the same on all ranks, they say what they have measured:
:mod:`fusion_passes.ddp.replanning` has what becomes of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.aot_forward import ReducedInputs
from fusion_passes.ddp.averaged import Averaged
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.replan_meetings import decline
from fusion_passes.ddp.replanning import AT, Replanning
from fusion_passes.ddp.turns import is_training_thread
from fusion_passes.ddp.watched import PlannedGraph, Watched
from fusion_passes.plan.again import ChosenFrom
from fusion_passes.profile.records import Profile
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.ddp import parameters_of


class LaunchClock:
    """The modules whose steps are measured."""

    def __init__(self) -> None:
        self._watched = weakref.WeakKeyDictionary[DistributedDataParallel, Replanning]()
        self._timed: list[Watched] = []

    def watch(
        self,
        ddp: DistributedDataParallel,
        profile: Profile,
        path: Path,
        known: MeasuredSteps | None,
    ) -> None:
        """Measure some steps of a module that has been constructed, as soon as there are any.

        Args:
            ddp: the module.
            profile: of its ranks.
            path: of the file for what is measured.
            known: what was measured in an earlier start; the same on all ranks.
        """
        name, device = registry.module_of(ddp).group_name, parameters_of(ddp)[0].device
        self._watched[ddp] = Replanning(Watched(name, profile, path, device, known))
        participants[name].meets_at = AT[0]

    def note_planned(
        self, names: Collection[str], inputs: ReducedInputs, chosen_from: ChosenFrom | None
    ) -> None:
        """Note a backward that was planned when it was compiled with its forward.

        Args:
            names: of the modules whose gradients it reduces.
            inputs: the parameters.
            chosen_from: as in :class:`fusion_passes.ddp.watched.PlannedGraph`.
        """
        for item in self._watched.values():
            if item.watched.name in names:
                item.watched.graphs.append(PlannedGraph(inputs, chosen_from))

    @contextlib.contextmanager
    def timing(self, averaged: Averaged) -> Iterator[None]:
        """Around a backward and what ends it.

        Args:
            averaged: what the backward averages by itself.

        Raises:
            RanksDisagreeError: the ranks have met after it, and another one has failed or has not
                come.
        """
        if not self._watched or not is_training_thread():
            yield
            return
        there = [item.watched for item in self._watched.values() if self._is_there(item.watched)]
        self._timed = there
        for item in there:
            item.begin(averaged)
        try:
            yield
        except BaseException:
            for item in there:
                if item.is_due:
                    self._decline(item.participant, "a backward has failed")
            raise
        finally:
            self._timed = []
        for item in there:
            if self._is_there(item):
                item.end()
                self._meet(item)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around the backward itself, in which no other thread launches what this one does."""
        noted = self._timed if is_training_thread() else []
        for item in noted:
            item.note_launches()
        try:
            yield
        finally:
            for item in noted:
                item.stop()

    def meet_soon(self, participant: Participant) -> None:
        """Note that a round of a module has ended after which its ranks meet: they do when the
        backward is over, or, where there is no such backward here, this rank says so and goes on.
        """
        item = next((item for item in self._timed if item.name == participant.module), None)
        if item is not None and is_training_thread():
            item.is_due = True
        else:
            self._decline(participant, "a rank had no inputs, or another thread or no graph ran it")

    def _decline(self, participant: Participant, because: str) -> None:
        ddp = registry.ddp_of(participant.module)
        replanning = self._watched.pop(ddp, None) if ddp is not None else None
        if replanning is not None:
            replanning.leave(because)
        decline(participant, because)

    def _meet(self, item: Watched) -> None:
        if not item.is_due:
            return
        item.is_due = False
        ddp = registry.ddp_of(item.name)
        assert ddp is not None, "it has just had a backward"
        # Whatever happens there, this is not tried again.
        replanning = self._watched.pop(ddp)
        if replanning.meet(ddp):
            self._watched[ddp] = replanning

    def _is_there(self, item: Watched) -> bool:
        """Whether a module is still managed, on the group that it had."""
        ddp = registry.ddp_of(item.name)
        return (
            ddp is not None
            and ddp in self._watched
            and self._watched[ddp].watched is item
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
