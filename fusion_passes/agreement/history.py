"""What the ranks of a DDP module have agreed on, and how far this rank is in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.launches import LATE, LaunchList, parameters_in
from fusion_passes.agreement.rendezvous import (
    leave_word,
    note_failed,
    short_timeout,
    who_goes_on,
)
from fusion_passes.agreement.round import Round
from fusion_passes.agreement.sharing import sharing_on
from fusion_passes.agreement.usage import Usage
from fusion_passes.torch_private.groups import collectives_issued


@dataclass
class History(Round):
    """What the ranks of a module have agreed on.

    Attributes:
        module: the module's name for its group.
        key: the same on all ranks: under it they meet.
        usage: of parameters, where ranks may use others in each step; else ``None``.
        process_group: the name of its process group, on which other modules may be too; by default,
            it has one of its own.
        history: what the ranks have agreed on, by kind of round, in order.
        rounds: how many rounds have ended.
        meets_at: after so many, the ranks speak of their plan (``ddp/replanning.py``); -1: never.
        failures: how many have failed, as far as this rank has said or heard.
        failed_at: where the ranks say that they have failed, of the last round that has; empty
            where others come to meet this rank in it, or this one knows that they have failed.
        is_broken: whether a collective of a round has failed.
        used: in a static graph, the parameters that some rank has used; ``None`` before its first
            round has ended.
        own_use: of these, what this rank has used in the first round in which it had inputs;
            ``None`` before that has ended.
    """

    module: str
    key: str
    usage: Usage | None = None
    process_group: str = ""
    history: dict[str, list[LaunchList]] = field(default_factory=dict)
    rounds: int = 0
    meets_at: int = -1
    failures: int = 0
    failed_at: str = ""
    is_broken: bool = False
    used: frozenset[int] | None = None
    own_use: frozenset[int] | None = None

    def __post_init__(self) -> None:
        self.process_group = self.process_group or self.module

    @property
    def agreed(self) -> list[LaunchList]:
        """The history of this kind of round."""
        return self.history.setdefault(self.kind, [])

    @property
    def place(self) -> str:
        """Where in the store the ranks meet next."""
        kind, numbers = self.kind or "round", f"{self.rounds}/{self.failures}/{self.meetings}"
        return f"ddp_fusion/{self.key}/{kind}/{numbers}"

    @property
    def turn(self) -> float | None:
        """When the other ranks launch what they have agreed on and comes next, among the graphs of
        this backward; infinity where it follows them, ``None`` if there is nothing."""
        first = self.position - bool(self.unsent)
        if first >= len(self.agreed):
            return None
        sharing, number = sharing_on(self.process_group), first - self.begun_at
        follows = self.agreed[first].mode == LATE and not sharing.has_come_to(self.module, number)
        return math.inf if follows else sharing.turn(self.module, number)

    @property
    def sent_now(self) -> frozenset[int]:
        """What this rank has sent in this round."""
        return parameters_in(self.agreed[: self.position])

    @property
    def has_more_to_send(self) -> bool:
        """Whether this rank has yet to send something in a round of whatever it has used, or to
        hear that no other has. Where the ranks have met, none knows that before they meet again."""
        if self.unsent:
            return True
        if self.usage is None or self.is_complete:
            return False
        is_known = self.position >= max(1, len(self.agreed))
        sends_all = self.sent_now.issuperset(self.usage.trained)
        return not is_known or (self.meetings > 0 and not sends_all)

    @property
    def unused(self) -> frozenset[int]:
        """The parameters of a static graph that others have used in this round, this rank not."""
        return (self.used or frozenset()) - self.received if not self.kind else frozenset()

    def deliver(self, numbers: Iterable[int], averages: Iterable[Tensor], flags: Tensor) -> None:
        """As :meth:`fusion_passes.agreement.usage.Usage.deliver`, of what was launched."""
        if self.usage is None or (self.is_local and not self.unsent):
            return
        if self.is_local:
            unsent = {number for item in self.unsent for number in item.parameters}
            sent = self.agreed[self.position - 1].parameters - unsent
            found = dict(zip(numbers, averages, strict=True))
            numbers = [number for number in found if number in sent]
            averages = [found[number] for number in numbers]
            flags = flags if self.usage.flags in sent else torch.zeros_like(flags)
        self.usage.deliver(numbers, averages, flags)

    def leaves_all(self, launches: LaunchList) -> bool:
        """Whether all ranks leave what graphs would launch to the end of the backward."""
        return self.usage is not None and self.usage.leaves_all(launches)

    def note_begun(self, launches: LaunchList, *, everywhere: bool) -> None:
        """Note that a graph has come to the first launch of a list, which stays on this rank, or on
        all."""
        if self.usage is not None and launches.foreign:
            self.usage.has_foreign = True
        issued = collectives_issued(self.process_group)
        if issued is not None:
            self.begun.append((issued, None if everywhere else launches.foreign))

    def count_foreign(self) -> None:
        """Count, at the end of a backward, the collectives that have followed what has stayed on
        this rank. What shares the process group has stayed here too: they are not DDP's."""
        self.foreign.clear()
        calls_hooks = any(item.for_hook for item in self.agreed)  # Which may launch anything.
        if not self.begun or calls_hooks:
            return
        issued = collectives_issued(self.process_group)
        assert issued is not None, "it was known when they came"
        for begun, in_graph in self.begun:
            after_list = issued - begun
            # The graph may have had its own before it came to the list: Inductor moves that place.
            self.foreign.append((after_list, 0 if in_graph is None else after_list - in_graph))

    def leave_word(
        self, reason: str, texts: Mapping[int, str] | None = None, *, is_overtaken: bool = False
    ) -> None:
        """Leave word that this rank has failed: ranks that wait for it get an error at once.

        Args:
            reason: for people; empty if ``texts`` give it.
            texts: the collectives of the ranks, for people.
            is_overtaken: as of :class:`RanksDisagreeError`.
        """
        meeting = meeting_of(self.module)
        if meeting is not None:
            leave_word(meeting, self.place, reason, texts or {}, is_overtaken=is_overtaken)

    @property
    def _ends_at(self) -> str:
        return f"ddp_fusion/{self.key}/{self.rounds}/{self.failures}"

    def note_failed(self) -> None:
        """Say that this rank's round fails."""
        meeting = meeting_of(self.module)
        if meeting is not None and not self.is_alone:
            note_failed(meeting, self._ends_at)

    def who_goes_on(self, *, waits: bool) -> list[int] | None:
        """The ranks whose last round has not failed, as this rank's has, and that may have launched
        what this rank has not; ``None`` if the store does not answer.

        Args:
            waits: whether ranks that fail at the same time have a moment to say so.
        """
        meeting = meeting_of(self.module)
        if meeting is None or not self.failed_at:
            return []
        seconds = short_timeout(meeting) if waits else timedelta()
        found = who_goes_on(meeting, self.failed_at, seconds)
        if found == []:
            self.failed_at = ""
        return found

    def end_round(self) -> None:
        """All gradients of the round have been reduced."""
        del self.agreed[self.position :]
        self.rounds += 1
        if self.usage is not None:
            self.agreed[:] = self.usage.end_round(self.kind, self.agreed)
        self.begin()

    def fail_round(self, *, is_broken: bool = False) -> None:
        """The round has ended with an error, of a collective if ``is_broken``. All ranks that know
        of it can try again, and meet first: some collectives may have been launched on one rank and
        not on another. One that has only waited in vain, for ranks that have yet to fail, comes to
        the same place again."""
        self.is_broken |= is_broken
        self.failed_at = self._ends_at if self.agreed and not self.is_alone else ""
        self.failures += not self.is_alone
        self.history.clear()
        if self.usage is not None:
            self.usage.fail_round()
        self.used = self.own_use = None
        self.begin()

    def absent_before(self, launches: LaunchList) -> list[LaunchList]:
        """What the ranks send before a list, and the backward of this rank does not reach: nothing
        unless it is all that they send before it.

        Args:
            launches: the list.
        """
        if self.usage is None:
            return []
        ahead = self.agreed[self.position :]
        if launches not in ahead:
            return []
        before = ahead[: ahead.index(launches)]
        return before if all(map(self.usage.is_absent, before)) else []
