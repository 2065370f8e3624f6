"""A DDP module of this rank among those of the other ranks; see
:mod:`fusion_passes.agreement.protocol`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from fusion_passes.agreement.comparing import statement_of, texts_of
from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.history import History
from fusion_passes.agreement.launches import FOLLOWS, LATE, Collective, LaunchList
from fusion_passes.agreement.rendezvous import RanksDisagreeError, Terms, meet
from fusion_passes.agreement.sharing import sharing_on
from fusion_passes.torch_private import resolve_process_group
from fusion_passes.torch_private.calling_thread import calling_thread


@dataclass
class Participant(History):
    """A DDP module of this rank among those of the other ranks.

    Attributes:
        settings: the options that must be the same on all ranks, read when they meet.
        stand_aside: keeps the collectives of the module's graphs on this rank.
        refuse: raises for gradients that DDP refuses: of parameters that a static graph has not
            used before, or, if told so, that an earlier backward of the round has given.
        launch_absent: launches, with zeros, what others send and this rank's backward does not
            reach; gives what waits for it, and keeps the averages.
        needs_replanning: whether a compiled graph differs from the history, but need not.
    """

    settings: Callable[[], str] = lambda: ""
    stand_aside: Callable[[], None] = lambda: None
    refuse: Callable[[Iterable[int], bool], None] = lambda *_: None
    launch_absent: Callable[[Participant, LaunchList], Callable[[], None]] = lambda *_: lambda: None
    needs_replanning: bool = False
    _changes: Counter[tuple[int, LaunchList]] = field(default_factory=Counter)
    _replanned: set[LaunchList] = field(default_factory=set)

    def receive(self, numbers: Iterable[int]) -> None:
        """Note gradients that have come. Raises a RuntimeError for those that DDP refuses."""
        came = frozenset(numbers)
        if repeated := self.note(came):
            self.refuse(repeated, True)
        known = self.used if self.own_use is None else self.own_use
        if known is not None and not self.kind and came - known:
            self.refuse(came - known, False)

    def announce(self, launches: LaunchList | None, is_optional: bool = False) -> None:
        """Agree with the other ranks on a graph's launches, before its first one. When this
        returns, the graph may go on: its collectives match theirs, or stay on this rank.

        Args:
            launches: what the graph is going to launch; ``None`` if nobody knows whose gradients
                they are.
            is_optional: whether it also runs in backwards that it must not average.

        Raises:
            RanksDisagreeError: settings differ, a rank has failed, or one has not come in time.
        """
        if launches is None or (is_optional and not self.is_averaged):
            self.thread = calling_thread()
            self._go_local()
            return
        if is_optional:
            self.announced |= launches.parameters
        self.receive(self._reached(launches.parameters))
        later = () if is_optional else launches.later  # There, hooks find out what has come.
        if launches.collectives and not self.agrees_to(launches):
            later += launches.collectives
        self._leave(later)

    def _leave(self, items: Iterable[Collective]) -> None:
        """Leave gradients that the graph gives to the end of the backward."""
        for item in items:
            own = self._reached(item.parameters)
            self.receive(own)
            self.late |= dict.fromkeys(own, item.divided in ("before", "after"))

    def _reached(self, numbers: Iterable[int]) -> frozenset[int]:
        return self.usage.reached.intersection(numbers) if self.usage else frozenset(numbers)

    def agrees_to(self, launches: LaunchList) -> bool:
        """Agree on what is launched by a graph, or by hand while a backward goes on, of gradients
        that have come: whether it is to be launched now. It is left to the end of the backward
        otherwise."""
        sharing = sharing_on(self.process_group)
        may_launch = sharing.enter(self.module, launches)
        everywhere = self.leaves_all(launches) or (not may_launch and sharing.stays_everywhere)
        if not self.is_local:
            if everywhere:
                self._go_local(launches)
            elif may_launch:
                self._settle(launches)
            else:
                self._stay(launches)
        if self.is_local:
            self.note_begun(launches, everywhere=everywhere)
        sharing.settle(self.module, self, launches)
        return not self.is_local

    def withdraw(self, launches: LaunchList, place: int, *, everywhere: bool) -> None:
        """Keep the collectives of a list, which was to be launched, from a place of the graph on on
        this rank, or on all."""
        self.unsent[:] = [item for item in launches.collectives if item.place >= place]
        if not self.unsent:
            return
        left = replace(launches, collectives=tuple(self.unsent))
        if not everywhere and left.is_overtaken(launches.foreign):
            self._fail(left, launches, is_overtaken=True)
        self._go_local(launches)
        self._leave(self.unsent)
        if len(self.unsent) == len(launches.collectives):
            self.unsent.clear()
            self.position -= 1

    def _settle(self, launches: LaunchList) -> None:
        for item in self.absent_before(launches):
            self._send_absent(item)
        known = [] if self.meetings else self.agreed  # Or there may be more of it.
        if self.usage is not None and self.usage.refuses(launches, known):
            self._stay(launches)
            return
        if self.position == len(self.agreed) and not (self.usage is not None and known):
            self._run(launches, self._meet(launches))
            return
        expected = self.agreed[self.position] if self.position < len(self.agreed) else None
        if expected == launches or meeting_of(self.module) is None:
            self._run(launches, launches)
        elif expected is not None and self._may_change(expected, launches):
            self._run(launches, self._changed(launches))
        else:
            self._follow(launches)

    def _may_change(self, expected: LaunchList, launches: LaunchList) -> bool:
        """Whether all ranks may have come to launch something else. Where ranks may use others in
        each step, they learn that from the flags, and none waits for others in vain."""
        if self.usage is not None and not self.usage.sends_all:
            return False
        return expected.may_become(launches, all_are_sent=self.usage is not None)

    def _run(self, launches: LaunchList, reference: LaunchList | None) -> None:
        """Go on with a graph that launches ``launches`` where all ranks are to run
        ``reference``; ``None`` if nothing can be run yet."""
        if reference is not None:
            self._agree_on(reference)
        if reference is None and self.usage is None:
            self._go_local()
        elif reference == launches:
            self.position += 1
        elif reference is not None and self._sends_absent(launches, reference):
            self._send_absent(reference)
            self._settle(launches)
        else:
            self._follow(launches)

    def _sends_absent(self, launches: LaunchList, reference: LaunchList) -> bool:
        can_be_sent = self.usage is not None and self.usage.is_absent(reference)
        return can_be_sent and self._is_part(launches)

    def _send_absent(self, launches: LaunchList) -> None:
        self.position += 1
        self.absent.append(self.launch_absent(self, launches))

    def _is_part(self, launches: LaunchList) -> bool:
        return self.usage is not None and not self.usage.reached <= launches.parameters

    def _agree_on(self, reference: LaunchList) -> None:
        self.agreed[self.position : self.position + 1] = [reference]
        if self.usage is not None:
            self.usage.note_agreed(self.kind, self.agreed)

    def _follow(self, launches: LaunchList) -> None:
        self._stay(launches)
        if self.usage is not None:
            self.usage.is_out_of_order |= self._is_part(launches)
        # Once for each list: a graph that cannot be planned so stays as it is. So does a part of a
        # backward, which has no zeros for what others send.
        if not self._is_part(launches) and launches not in self._replanned:
            self._replanned.add(launches)
            self.needs_replanning = True

    def _stay(self, launches: LaunchList) -> None:
        """Keep a graph's collectives on this rank, if what others launch there can be by hand."""
        expected = self.agreed[self.position] if self.position < len(self.agreed) else None
        if expected is not None and expected.is_overtaken(launches.foreign):
            self._fail(expected, launches, is_overtaken=True)
        self._go_local(launches)

    def _fail(self, expected: LaunchList, own: LaunchList, *, is_overtaken: bool) -> NoReturn:
        """This rank cannot launch what the ranks have agreed on, whatever the others do;
        ``is_overtaken``: because its foreign collectives would pair up with that, or have."""
        texts = {resolve_process_group(self.module).rank(): own.encode()}
        self.leave_word("", texts, is_overtaken=is_overtaken)
        raise RanksDisagreeError(
            self.module, texts, agreed=expected.encode(), is_overtaken=is_overtaken
        )

    def _go_local(self, launches: LaunchList | None = None) -> None:
        if self.usage is not None and launches is not None and self._is_part(launches):
            self.usage.keep_part()
        self.is_local = True
        self.stand_aside()

    def _changed(self, launches: LaunchList) -> LaunchList | None:
        """What all ranks run in the place of what they have agreed on, if all have changed.

        One that changes alone must not wait long, nor each time: it asks the first, second, fourth.
        """
        self._changes[self.position, launches] += 1
        count = self._changes[self.position, launches]
        if count & (count - 1):
            return None
        reference = self._meet(launches, is_change=True)
        if reference is not None:
            del self.agreed[self.position :]
        return reference

    def next_late(self, plan: Callable[[], LaunchList]) -> LaunchList:
        """What to reduce next of the gradients that no graph has reduced.

        Args:
            plan: gives all of them, :attr:`unused` ones included, planned from what ranks cannot
                differ in.

        Returns:
            A list of some of the parameters of ``plan()``; an empty one where no rank has any.

        Raises:
            RanksDisagreeError: the other ranks reduce others, or as in :meth:`announce`.
        """
        if self.unsent:
            items, self.unsent = tuple(self.unsent), []
            return replace(self.agreed[self.position - 1], collectives=items)
        own = plan()
        while self.position == len(self.agreed):
            part = self.usage.known_part(self.kind, own) if self.usage is not None else None
            foreign = max((after_list for after_list, _ in self.foreign), default=0)
            reference = self._meet(replace(part or own, foreign=foreign))
            if reference is not None and not reference.collectives:
                self.is_complete = True
                return reference
            # None: others have found out in a graph that they differ, and come here too; or what
            # they have used is now known.
            if reference is not None:
                self._agree_on(reference)
            own = plan()
        expected = self.agreed[self.position]
        _, after_graph = self.foreign.pop(0) if self.foreign else (0, 0)
        is_overtaken = after_graph > 0 and expected.mode != LATE
        if not is_overtaken and not expected.parameters <= own.parameters:
            # As eager DDP, which raises an error in the next forward, if no rank has all of them.
            reference = self._meet(own, is_change=True) if self.usage is None else None
            if reference is not None:
                self.agreed[self.position :] = [expected := reference]
        if is_overtaken or not expected.parameters <= own.parameters:
            self._fail(expected, own, is_overtaken=is_overtaken)
        self.position += 1
        return expected

    def _meet(self, launches: LaunchList, is_change: bool = False) -> LaunchList | None:
        """The list that all ranks are to run, once all have come; ``None`` if there is none yet:
        they reduce other gradients, or not all have changed."""
        meeting = meeting_of(self.module)
        if meeting is None:
            return launches
        place = f"{self.place}/change{self.position}" if is_change else self.place
        is_first = not (self.meetings or self.kind or self.agreed)
        self.meetings += not is_change
        reached = self.usage.reached if self.usage is not None else ()
        statement = statement_of(self.settings(), launches, reached)
        terms = Terms(self.module, is_change, may_lack=self.usage is not None)
        try:
            kind, value = meet(meeting, place, statement, terms)
        except RanksDisagreeError as error:
            self.is_alone = is_first and bool(error.silent)
            raise
        if self.usage is not None:
            texts = [value] if kind == "run" else texts_of(value).values()
            self.usage.learn_foreign(map(LaunchList.decode, texts))
        if kind == "nothing" and self.usage is not None:
            if not is_change:
                self.usage.learn(self.kind, texts_of(value).values())
        elif kind == "nothing" and self.is_sharing:
            lists = map(LaunchList.decode, texts_of(value).values())
            used = (item.parameters for item in lists if item.mode != FOLLOWS)
            self.used = frozenset(self.received).union(*used)
        elif kind == "nothing":
            raise RanksDisagreeError(self.module, texts_of(value))
        return LaunchList.decode(value) if kind == "run" else None
