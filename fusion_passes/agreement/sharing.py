"""Modules that share a process group in one backward.

Collectives of a process group pair up in the order in which each rank issues them, whichever module
they are of. So what keeps a list of one module on this rank keeps all that follows it there, of
other modules too. It follows the backward, in the order in which the other ranks run it: that of
the graphs here, which are taken to be those of the others too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from fusion_passes.agreement.launches import LaunchList
from fusion_passes.state import Lifetime, process_state


class Member(Protocol):
    """What is to be known here of a module."""

    is_local: bool

    def leaves_all(self, launches: LaunchList) -> bool:
        """Whether all ranks leave what graphs would launch to the end of the backward."""

    def withdraw(self, launches: LaunchList, place: int, *, everywhere: bool) -> None:
        """Keep the collectives of a list from a place on on this rank."""


@dataclass
class Sharing:
    """The modules of a process group in the backward that runs.

    Attributes:
        stays_everywhere: whether what has stayed on this rank in graphs before has on all.
    """

    _graphs: int = 0
    _places: set[int] = field(default_factory=set)
    _turns: dict[str, list[int]] = field(default_factory=dict)
    _graph: dict[str, tuple[Member, LaunchList]] = field(default_factory=dict)
    _is_local: bool = False
    stays_everywhere: bool = True

    def enter(self, module: str, launches: LaunchList) -> bool:
        """Begin with a list.

        Returns:
            Whether it may be launched: no graph before has stayed on this rank. Other ranks may
            still be waiting for that one, and meet for this one only then.
        """
        places = {item.place for item in launches.collectives}
        if 0 in places or places & self._places:  # Each graph counts anew.
            self._graphs += 1
            self._places.clear()
            for member, own in self._graph.values():
                self._is_local |= member.is_local
                self.stays_everywhere &= not member.is_local or member.leaves_all(own)
            self._graph.clear()
        self._places |= places
        self._turns.setdefault(module, []).append(self._graphs)
        return not self._is_local

    def settle(self, module: str, member: Member, launches: LaunchList) -> None:
        """Note whether the list is launched. What follows it in the graph is, if it is.

        Args:
            module: the name of a module for its group.
            member: the same.
            launches: the list that :meth:`enter` was given last.
        """
        others = list(self._graph.values())
        self._graph[module] = member, launches
        if member.is_local:
            place, everywhere = launches.collectives[0].place, member.leaves_all(launches)
            for other, theirs in others:
                if not other.is_local:
                    other.withdraw(theirs, place, everywhere=everywhere)
        elif staying := [(other, theirs) for other, theirs in others if other.is_local]:
            everywhere = all(other.leaves_all(theirs) for other, theirs in staying)
            member.withdraw(launches, 0, everywhere=everywhere)

    def turn(self, module: str, number: int) -> float:
        """In which graph a module has come to the list of that number in this backward, as far as
        is known; infinity if it has come to none."""
        turns = self._turns.get(module)
        return turns[min(number, len(turns) - 1)] if turns else math.inf

    def has_come_to(self, module: str, number: int) -> bool:
        """Whether it has come to the list of that number."""
        return number < len(self._turns.get(module, ()))


_sharing: Final = process_state.keep(
    dict[str, Sharing](),
    "the modules that share a process group in the backward that runs, by its name",
    Lifetime.CALL,
    reset=dict.clear,
)


def sharing_on(process_group: str) -> Sharing:
    """The modules of a process group in the backward that runs."""
    return _sharing.setdefault(process_group, Sharing())


def end_sharing(process_group: str) -> None:
    """Note that a backward has ended."""
    _sharing.pop(process_group, None)
