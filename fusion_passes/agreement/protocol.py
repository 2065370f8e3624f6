"""All ranks of a process group run the same collectives, or all of them get an error.

Each rank compiles its graphs from what its own backward has traced, so two ranks can get to
different collectives: another batch size makes other kernels, another branch another order, a
graph break more graphs. What ranks have once agreed on therefore stays: it is kept as the
*history* of a DDP module, one :class:`LaunchList` for each graph of a round (a round is all that
lies between a forward and the last gradient that it expects). A graph says just before its first
launch what it is about to launch:

* It is what the history has in this place. Nothing is sent.
* The history has nothing in this place yet. The ranks meet over the group's store. If all run the
  same, that is the history from now on. If they reduce the same gradients otherwise, the list
  of the lowest rank is, and the others follow.
* It is something else. The graph's collectives stay on this rank, and what the history says is
  done by hand when the backward has ended (:mod:`fusion_passes.ddp.late`): other ranks, which know
  nothing of this, meet what they expect. Modules on the same process group follow it there
  (:mod:`fusion_passes.agreement.sharing`). If collectives that are not DDP's are in between, which
  by hand would come too late, it is an error: see record 25 of docs/decisions.

So a rank whose graphs differ costs its own overlap, and neither a hang nor a wrong gradient; where
the same gradients are reduced, its next graph is planned as the history says.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from fusion_passes.agreement.comparing import texts_of
from fusion_passes.agreement.exchange import ENDED, Meeting, asked, meeting_of, said_at
from fusion_passes.agreement.launches import LaunchList, number_runs
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import local_process_group, stand_for_local
from fusion_passes.torch_private.stand_ins import redirect

participants: Final = process_state.keep(
    dict[str, Participant](),
    "the managed modules among those of the other ranks, by their names for their groups",
    Lifetime.MODULE,
    reset=dict.clear,
)
"""Loops go over a copy: a module that is freed, which the collector may do at any time, takes its
own out."""


@dataclass
class Borrowed:
    """Names and numbers that stand for others' in the backward that runs.

    Attributes:
        names: of modules, in any of its graphs.
        modules: whose each module's stands for, in the graph that runs.
        parameters: likewise of parameters, by a module's name and a number; empty where each graph
            has its own.
    """

    names: set[str] = field(default_factory=set)
    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def reset(self) -> None:
        vars(self).update(vars(Borrowed()))

    def own(self, module: str, launches: LaunchList) -> LaunchList | None:
        """The list with the numbers of the parameters for which the graph runs; ``None`` if it is
        none of theirs."""
        if not self.parameters:
            return launches
        own = {n: self.parameters.get((module, n), ("", -1))[1] for n in launches.parameters}
        return None if -1 in own.values() else launches.renumbered(own)


borrowed: Final = process_state.keep(
    Borrowed(),
    "names and numbers that stand for others' in the backward that runs",
    Lifetime.CALL,
    reset=Borrowed.reset,
)


@dataclass
class LaunchCounter:
    """Counts the launches of a module in the list of the graph that runs.

    Attributes:
        module: the module's name for its group.
    """

    module: str
    _list: tuple[object, ...] = ()
    _count: int = 0

    def next(self) -> int:
        """The number of the launch that comes now, from 0 on."""
        now = participants[self.module]
        current = (now.rounds, now.failures, now.kind, now.position)
        if current != self._list:
            self._list, self._count = current, 0
        self._count += 1
        return self._count - 1


def forget_histories() -> None:
    """Let the ranks agree anew, but on buckets whose sizes a communication hook may know."""
    for participant in list(participants.values()):
        lists = [item for items in participant.history.values() for item in items]
        if not any(item.for_hook for item in lists):
            participant.history.clear()


def announce(module: str, text: str, is_optional: bool = False) -> None:
    """See :meth:`Participant.announce`.

    Args:
        module: the DDP module's name for its group.
        text: a :class:`LaunchList`'s.
        is_optional: whether the graph also runs in backwards that are not averaged.
    """
    participant = participants.get(borrowed.modules.get(module, module))
    launches = borrowed.own(module, LaunchList.decode(text))
    if participant is not None:
        participant.announce(launches, is_optional)
        for name in borrowed.names:  # Another module of the graph may have been withdrawn.
            mine = participants.get(borrowed.modules.get(name, name))
            if mine is not None and mine.is_local:
                redirect(name, local_process_group())
    elif is_optional:
        # The graph has outlived its module, and runs for another over the same parameters.
        stand_for_local(module)


def deliver(module: str, numbers: Iterable[int], averages: Iterable[Tensor], flags: Tensor) -> None:
    """See :meth:`fusion_passes.agreement.history.History.deliver`.

    Args:
        module: the DDP module's name for its group.
        numbers: of parameters.
        averages: of their gradients.
        flags: which parameters some rank has used.
    """
    participant = participants.get(borrowed.modules.get(module, module))
    if participant is not None:
        participant.deliver(numbers, averages, flags)


def agreed_list(module: str, parameters: Collection[int]) -> LaunchList | None:
    """How the ranks have agreed to reduce the gradients of these parameters, if they have."""
    participant = participants.get(module)
    wanted = frozenset(parameters)
    for launches in participant.history.values() if participant else ():
        for item in launches:
            if item.parameters == wanted:
                return item
    return None


def agreed_lists() -> tuple[str, ...]:
    """All that the ranks have agreed on: a graph can depend on it."""
    texts = [
        f"{participant.module} {kind}: {item.encode()}"
        for participant in list(participants.values())
        for kind, items in sorted(participant.history.items())
        for item in items
    ]
    for participant in list(participants.values()):
        if participant.usage is not None:
            sent = sorted(participant.usage.sent_in(participant.kind))
            reached = sorted(participant.usage.reached)
            sends = f"{number_runs(sent)}, reaches {number_runs(reached)}"
            texts.append(f"{participant.module} sends {sends}")
    return tuple(texts)


def why_failed(modules: Iterable[str]) -> RanksDisagreeError | None:
    """Why a collective of one of the modules may just have failed: another rank was not in it.
    ``None`` if none has said so."""
    for module in modules:
        participant = participants.get(module)
        meeting = meeting_of(module) if participant is not None else None
        if participant is None or meeting is None:
            continue
        found = asked(functools.partial(said_at, meeting, participant.place))
        if found is None:
            return None  # The store does not answer, and each question takes a second.
        error = _why(participant, meeting, *found)
        if error is not None:
            return error
    return None


def _why(
    participant: Participant, meeting: Meeting, said: Mapping[int, str], verdict: Any
) -> RanksDisagreeError | None:
    own = {}
    if participant.agreed:
        last = participant.agreed[max(participant.position - 1, 0)]
        own = {meeting.rank: last.encode()}
    if verdict is not None and verdict[0] == "failed":
        value = verdict[1]
        texts = texts_of(value["statements"]) | own
        return RanksDisagreeError(participant.module, texts, **value["error"])
    if verdict is not None and verdict[0] == ENDED:
        return RanksDisagreeError(participant.module, {}, failure=verdict[1])
    if not said or meeting.rank in said:
        return None
    return RanksDisagreeError(participant.module, texts_of(said) | own)
