"""What a module's round has come to on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fusion_passes.agreement.launches import Collective
from fusion_passes.torch_private.calling_thread import calling_thread


@dataclass(kw_only=True)
class Round:
    """What lies between a forward and the last gradient that it expects, on this rank.

    Attributes:
        kind: all but the first backward of a forward are ``"extra"``.
        position: how many of the history's lists it has launched.
        begun_at: how many of them the backwards before the one that runs.
        unsent: collectives of the last of them that have stayed on this rank.
        begun: of each list that has stayed on this rank in the backward that runs, how many
            collectives the process group had been given when its graph came to it, and how many
            foreign ones the graph has; ``None`` if it has stayed on all ranks.
        foreign: of each of them, how many have followed it by the end of that backward, and at
            least how many have followed its graph that others may have launched it before. None is
            DDP's.
        meetings: how often the ranks have met in it.
        is_averaged: whether the graph that was compiled with a forward averages its backward now.
        announced: numbers of the parameters that this graph has announced.
        is_local: whether the collectives of the backward that runs stay on this rank.
        is_sharing: whether the ranks have yet to say which parameters they have used.
        received: numbers of the parameters whose gradients there are.
        came: those that the backward which runs has given.
        earlier: those that backwards before it have given.
        late: those that are still to be reduced, and whether they are divided already.
        absent: what waits for the launches that this rank has sent zeros in.
        is_alone: whether it has ended where it began: no other rank has come to meet this one.
        is_complete: whether the ranks know that none of them sends more in it.
        thread: which has called the backward that has given a gradient last.
    """

    kind: str = ""
    position: int = 0
    begun_at: int = 0
    meetings: int = 0
    is_averaged: bool = False
    announced: set[int] = field(default_factory=set)
    is_local: bool = False
    is_sharing: bool = False
    is_alone: bool = False
    is_complete: bool = False
    received: set[int] = field(default_factory=set)
    came: set[int] = field(default_factory=set)
    earlier: set[int] = field(default_factory=set)
    late: dict[int, bool] = field(default_factory=dict)
    unsent: list[Collective] = field(default_factory=list)
    begun: list[tuple[int, int | None]] = field(default_factory=list)
    foreign: list[tuple[int, int]] = field(default_factory=list)
    absent: list[Callable[[], None]] = field(default_factory=list)
    thread: int = 0

    def note(self, came: frozenset[int]) -> frozenset[int]:
        """Note gradients that have come; those of them that an earlier backward has given."""
        self.thread = calling_thread()
        self.received |= came
        self.came |= came
        return came & self.earlier

    def end_backward(self) -> None:
        """Note that a backward has ended, and the round has not."""
        self.earlier |= self.came
        self.came.clear()
        self.begun.clear()
        self.foreign.clear()
        self.begun_at = self.position

    def begin(self) -> None:
        """Begin anew."""
        self.kind = ""
        self.position = self.begun_at = self.meetings = 0
        self.is_local = self.is_sharing = self.is_averaged = False
        self.is_alone = self.is_complete = False
        for items in (
            *(self.received, self.came, self.earlier),
            *(self.late, self.announced, self.absent, self.unsent, self.begun, self.foreign),
        ):
            items.clear()
