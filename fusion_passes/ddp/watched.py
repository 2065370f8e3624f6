"""Measures some steps of a module: when its buckets are launched, and when its backward is done."""

from __future__ import annotations

import statistics
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import borrowed, participants
from fusion_passes.ddp.aot_forward import ReducedInputs
from fusion_passes.ddp.averaged import NONE_AVERAGED, Averaged
from fusion_passes.ddp.managed_module import let_stand_for
from fusion_passes.ddp.modules import registry
from fusion_passes.plan.again import ChosenFrom
from fusion_passes.profile.records import Profile
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.torch_private import ProcessGroup
from fusion_passes.torch_private.profiling import is_profiling
from fusion_passes.torch_private.stand_ins import PreparingGroup, StandInGroup, called_by

FIRST_ROUND: Final = 2
"""Steps before it are not measured: they compile, and fill caches."""

STEPS: Final = 5
"""So many are measured; the median of each time counts."""

SHARES: Final = "it shares its compiled forward with another instance"


@dataclass(frozen=True)
class PlannedGraph:
    """A backward that was planned in this process, when it was compiled with its forward.

    Attributes:
        inputs: the parameters whose gradients it reduces.
        chosen_from: what its buckets were chosen from; ``None`` where they are those of several
            modules.
    """

    inputs: ReducedInputs
    chosen_from: ChosenFrom | None


@dataclass
class Watched:
    """A module whose steps are measured.

    Attributes:
        name: the module's for its group.
        profile: of its ranks.
        path: of the file for what is measured.
        device: of its gradients.
        known: what the file has, the same on all ranks; ``None`` if there was none.
        graphs: its backwards that were planned, in the order of their compiles.
        from_round: rounds before it are not measured.
        launches: of the steps that were measured, as text.
        steps: of each, when it began, when each bucket was launched, and when all was reduced.
        is_due: whether the ranks meet after the backward that runs.
    """

    name: str
    profile: Profile
    path: Path
    device: torch.device
    known: MeasuredSteps | None = None
    graphs: list[PlannedGraph] = field(default_factory=list)
    from_round: int = FIRST_ROUND
    launches: str = ""
    steps: list[list[int | torch.Event]] = field(default_factory=list)
    is_due: bool = False
    _moments: list[int | torch.Event] = field(default_factory=list)
    _groups: tuple[ProcessGroup, PreparingGroup] | None = None
    _round: int = 0
    _averaged: Averaged = NONE_AVERAGED
    _forward: weakref.ref[Any] | None = None
    _why_not: str = ""
    _obstacle: str = ""

    @property
    def participant(self) -> Participant:
        """The module among those of the other ranks."""
        return participants[self.name]

    @property
    def forward(self) -> Any | None:
        """The compiled forward whose backward was measured; ``None`` if it is not just one."""
        return self._forward() if self._forward is not None else None

    @property
    def why_not(self) -> str:
        """Why there is no :attr:`forward`, for people; what follows "because"."""
        return self._why_not or "its compiled forward is gone"

    @property
    def why_not_measured(self) -> str:
        """Why there are too few steps, for people."""
        reason = f": {self._obstacle}" if self._obstacle else ""
        return f"too few steps could be measured{reason}"

    @property
    def is_done(self) -> bool:
        """Whether enough steps were measured."""
        return len(self.steps) >= STEPS

    def begin(self, averaged: Averaged) -> None:
        """Begin a backward.

        Args:
            averaged: what it averages by itself.
        """
        self._round, self._averaged = self.participant.rounds, averaged
        self._moments.clear()

    def note_launches(self) -> None:
        """Begin to note the launches of a backward, if they are to be noted."""
        participant, ddp = self.participant, registry.ddp_of(self.name)
        if (
            ddp is None
            or self.is_done
            or participant.rounds < self.from_round
            or participant.kind
            or participant.received
            or participant.is_local
        ):
            return
        if self.name in borrowed.names:  # What is launched under it is another module's.
            self._obstacle = SHARES
        elif isinstance(registry.group_of(ddp), StandInGroup):
            self._obstacle = "a communication hook is called, or ranks without inputs are joined"
        else:
            self._obstacle = "a profiler ran" if is_profiling() else ""
        if self._obstacle:
            return
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
        if groups is None:
            return
        self._note()
        participant = participants.get(self.name)
        # Names of a module whose collectives stay on this rank stand for another group already.
        if participant is not None and not participant.is_local:
            let_stand_for([self.name], groups[0])

    def end(self) -> None:
        """Keep what was noted, if all buckets of a step were launched."""
        text, averaged = _launches_of(self.participant), self._averaged
        self._averaged = NONE_AVERAGED
        if not text and self._moments:
            self._obstacle = "its gradients are reduced by several graphs, or by none"
        count = len(LaunchList.decode(text).collectives) if text else 0
        if not count or len(self._moments) != count + 2:
            return
        if self.participant.rounds != self._round + 1:
            return
        why_not = _why_several(averaged)
        forward = None if why_not else averaged.forwards[0].forward
        if text != self.launches or forward is not self.forward:
            self.launches, self.steps = text, []
        self._forward = None if forward is None else weakref.ref(forward)
        self._why_not = why_not
        self.steps.append(list(self._moments))

    def measure_again(self, from_round: int) -> None:
        """Forget the steps, and measure others of the same graph.

        Args:
            from_round: the first round that is measured.
        """
        self.from_round, self.launches, self.steps = from_round, "", []

    def medians_ns(self) -> list[int]:
        """From the beginning of the backward to each bucket's launch, and to its end."""
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


def _why_several(averaged: Averaged) -> str:
    """Why a backward is not just that of one compiled forward of one module, for people; empty if
    it is."""
    if not averaged.modules:
        return f"compiled autograd traces its backward: {averaged.why_not}"
    if len(averaged.forwards) > 1:
        return "its forward is compiled in several graphs"
    if len(averaged.modules) > 1:
        return "its backward is that of another DDP module, too"
    if averaged.outside:
        return "some of its layers are not compiled"
    return "" if averaged.forwards[0].lent.is_own else SHARES
