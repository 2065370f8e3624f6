"""Which parameters take part in a step, where ranks may use others in each
(``find_unused_parameters=True``).

All ranks send the same gradients all the same: those that some rank has used up to now. What a
rank has not used, it sends as zeros, or as the gradient that it has kept. With them go the *flags*,
one number a parameter: whether this rank has used it. So every rank knows after the backward which
parameters any has used, with no collective more, and all of them decide alike on what follows: a
parameter that none has used keeps its gradient, or has none; one that is new is reduced by one more
collective, and belongs to the others from then on.

Where a backward consists of several graphs, each sends the flags of its own parameters: one is used
if any of them says so. Their order is the one in which they came when the ranks have met, each with
parts of its own; a later backward may have them in another. Such a graph stays on its rank until
the backward has ended, and the last of the flags says so: then all meet anew in the next round, but
not in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from fusion_passes.agreement.launches import LATE, LaunchList, parameters_in

_IDLE_ROUNDS: Final = 8
"""After so many rounds in which no rank has used a part of the backward, nobody sends it: a step
with zeros costs its bytes, and a rank that comes to use it again a round that is not overlapped."""

_REORDER_ROUNDS: Final = 64
"""At least each of so many rounds can be the last before the ranks meet anew, if graphs come in
another order: to know that, all must read the flags, for which a GPU is waited for."""


@dataclass
class Usage:
    """What a module's ranks know of the parameters that they use.

    Attributes:
        trained: numbers of the parameters that can have a gradient, in order.
        flags: the number under which the flags are sent, one for each of ``trained`` and the last.
        has_gradient: whether a parameter has one now, by its number.
        reached: those that the backward which runs reaches on this rank.
        pending: those that this rank has used since the last round, in backwards that stayed on it.
        sends_all: whether the ranks send all of ``trained`` from the first round on: a
            communication hook is to see the same buckets in each step.
        sent: what the ranks send, flags included, by kind of round, where it is not all: nothing
            before they have met.
        averages: of parameters that this rank has sent zeros for, as a graph has left them.
        used: those that some rank has used in this round; ``None`` as long as that is not known.
        is_postponed: whether what a graph has launched is no average before the backward has ended.
        is_in_parts: whether a graph of this backward has stayed on this rank that was a part of it.
        times_in_parts: of how many backwards.
        is_out_of_order: whether one came where the ranks have agreed on something else.
        issued: how many collectives the process group had been given when the forward that runs
            began; ``None`` where that does not matter.
        suspects_foreign: whether a forward of the module has issued some that are not DDP's.
        has_foreign: whether its backward does, on any rank; ``None`` as long as that is not known.
        is_new: whether the ranks have only learnt in this round what they send.
        idle: for how many rounds no rank has used a parameter, by its number; the same on all.
        parts: what the ranks have sent from graphs, each a part of a backward; the same on all.
        settled: for how many rounds the ranks have not met; the same on all.
        reorders: how often they have met anew because graphs came in another order.
    """

    trained: tuple[int, ...]
    flags: int
    has_gradient: Callable[[int], bool]
    reached: frozenset[int] = frozenset()
    pending: set[int] = field(default_factory=set)
    sends_all: bool = False
    sent: dict[str, frozenset[int]] = field(default_factory=dict)
    averages: dict[int, Tensor] = field(default_factory=dict)
    used: frozenset[int] | None = None
    is_postponed: bool = False
    is_in_parts: bool = False
    times_in_parts: int = 0
    is_out_of_order: bool = False
    issued: int | None = None
    suspects_foreign: bool = False
    has_foreign: bool | None = None
    is_new: bool = False
    idle: dict[int, int] = field(default_factory=dict)
    parts: list[LaunchList] = field(default_factory=list)
    settled: int = 0
    reorders: int = 0

    def sent_in(self, kind: str) -> frozenset[int]:
        """What the ranks send in a kind of round, as far as that is known."""
        if self.sends_all:
            return frozenset((*self.trained, self.flags))
        return self.sent.get(kind, frozenset())

    def refuses(self, launches: LaunchList, agreed: Iterable[LaunchList] = ()) -> bool:
        """Whether what a graph would send is not what this rank has to, or not all that it must
        say.

        A graph sends zeros for what the ranks send and its backward does not reach, which is right
        for a parameter without a gradient. Its flags only name the parameters that it has. A
        communication hook is to see all buckets, the same in each step.

        Args:
            launches: what it would send.
            agreed: what the ranks send in such a round, this included; empty if that is not known.
        """
        zeros = launches.parameters - self.reached - {self.flags}
        lists = [launches] if self.sends_all else [*agreed, launches]
        known = parameters_in(lists)
        return (
            ((self.sends_all or len(lists) > 1) and not self.reached <= known)
            or not self.pending <= self.reached
            or any(map(self.has_gradient, zeros))
        )

    def leaves_all(self, launches: LaunchList) -> bool:
        """Whether all ranks leave what graphs would launch to the end of the backward.

        They do where collectives that are not DDP's lie in between: one that leaves out a part of
        the model reaches these at once, before or after what others have launched. As long as
        nobody knows, those of the forward have counterparts.

        Args:
            launches: what a graph would launch.
        """
        is_likely = self.has_foreign is None and self.suspects_foreign
        return bool(launches.foreign or self.has_foreign or is_likely)

    def learn_foreign(self, lists: Iterable[LaunchList]) -> None:
        """Note whether any rank's backward has issued collectives that are not DDP's.

        Args:
            lists: what the ranks have said, or what stands for all of it.
        """
        if any(item.foreign for item in lists):
            self.has_foreign = True
        elif self.suspects_foreign and self.has_foreign is None:
            self.has_foreign = False

    def is_absent(self, launches: LaunchList) -> bool:
        """Whether the backward that runs reaches none of the parameters of a list: this rank can
        send zeros for it whatever else it launches. A communication hook takes all at once."""
        return not self.sends_all and launches.parameters.isdisjoint(self.reached)

    def own_use(self, received: Iterable[int]) -> frozenset[int]:
        """What this rank has used in a round with these gradients."""
        return frozenset(self.pending).union(received)

    def flags_of(self, used: Iterable[int]) -> list[float]:
        """The flags of a rank that has used these parameters."""
        found = frozenset(used)
        of_parameters = [float(number in found) for number in self.trained]
        return [*of_parameters, float(self.is_out_of_order)]

    def begin_backward(self, reached: frozenset[int]) -> None:
        """Note what the backward reaches that begins."""
        self.reached = reached
        self.is_in_parts = False

    def keep_part(self) -> None:
        """Note that a graph stays on this rank that is a part of its backward."""
        self.times_in_parts += not self.is_in_parts
        self.is_in_parts = True

    def is_often_in_parts(self, rounds: int) -> bool:
        """Whether a part of the backward has stayed on this rank, and not only now and then: ranks
        that find out what they send, or a part that comes back, cost a backward.

        Args:
            rounds: how many have ended.
        """
        return self.is_in_parts and self.times_in_parts > 2 and 4 * self.times_in_parts > rounds

    def note_agreed(self, kind: str, agreed: Sequence[LaunchList]) -> None:
        """Note what the ranks have agreed on, up to now, in a kind of round."""
        self.sent[kind] = self.sent.get(kind, frozenset()) | parameters_in(agreed) | {self.flags}
        last = agreed[-1]
        if last.mode != LATE:
            numbers = last.parameters - {self.flags}
            self.parts = [item for item in self.parts if numbers.isdisjoint(item.parameters)]
            self.parts.append(last)

    def known_part(self, kind: str, left: LaunchList) -> LaunchList | None:
        """A part that a graph has sent before, of what is left to be sent by hand: where no graph
        of any rank sends it in this round, it stays what a later one can launch.

        Args:
            kind: of the round.
            left: what this rank has yet to send.
        """
        if self.sends_all:
            return None
        numbers = left.parameters & self.sent_in(kind)  # What all ranks have yet to send.
        parts = [item for item in self.parts if item.parameters <= numbers]
        return max(parts, key=LaunchList.order, default=None)

    def deliver(self, numbers: Iterable[int], averages: Iterable[Tensor], flags: Tensor) -> None:
        """Take what a graph has averaged for parameters that its backward does not reach.

        Args:
            numbers: of the parameters.
            averages: over all ranks; the graph may overwrite them when this returns.
            flags: those of all ranks; what postponed launches give is read later.
        """
        results = dict(zip(numbers, averages, strict=True))
        self.averages |= {number: result.clone() for number, result in results.items()}
        if not self.is_postponed:
            self.note_flags(flags)

    def note_flags(self, flags: Tensor) -> None:
        """Take the flags of all ranks that a graph has sent, or this rank by hand."""
        known = self.averages.get(self.flags)
        used = flags > 0
        self.averages[self.flags] = used if known is None else used | known

    def read(self, flags: Tensor, may_reorder: bool) -> None:
        """Note which parameters some rank has used.

        Args:
            flags: of all ranks; on a GPU, this waits for them.
            may_reorder: what :meth:`may_reorder` says.
        """
        *values, is_out_of_order = flags.tolist()
        self.used = frozenset(n for n, v in zip(self.trained, values, strict=True) if v)
        if is_out_of_order and may_reorder:
            self.is_new = True
            self.reorders += 1

    def may_reorder(self, agreed: Sequence[LaunchList]) -> bool:
        """Whether the ranks meet anew after this round if a graph of one is out of order. All of
        them must decide alike, and a meeting may not help: they do so ever less often.

        Args:
            agreed: what the ranks have sent in the round.
        """
        is_in_parts = len(agreed) > 1 or any(item.mode == LATE for item in agreed)
        is_power = self.settled & (self.settled - 1) == 0
        return (
            is_in_parts
            and not self.sends_all
            and self.settled >= min(2**self.reorders, _REORDER_ROUNDS)
            and (is_power or self.settled % _REORDER_ROUNDS == 0)
        )

    def learn(self, kind: str, texts: Iterable[str]) -> None:
        """Note what the ranks send from now on, in a kind of round: all that any has said."""
        lists = map(LaunchList.decode, texts)
        self.sent[kind] = frozenset({self.flags}).union(*(item.parameters for item in lists))
        self.is_new = True

    def must_read(self, kind: str, own_use: frozenset[int]) -> bool:
        """Whether the flags say what this rank cannot know: not where it has used all parameters,
        and the ranks send all of them."""
        every = frozenset(self.trained)
        return not (every <= own_use and every <= self.sent_in(kind))

    def end_round(self, kind: str, agreed: Sequence[LaunchList]) -> list[LaunchList]:
        """All gradients of the round have been reduced.

        Args:
            kind: of the round.
            agreed: what the ranks send in such a round.

        Returns:
            What they will send in the next one: nothing yet, if they meet once more, with graphs
            that are planned for what they send now. A list of a part of the backward whose
            parameters no rank has used for long is left out.
        """
        used = frozenset(self.trained) if self.used is None else self.used
        self.idle = {n: self.idle.get(n, 0) + 1 for n in self.trained if n not in used}
        self.settled = 0 if self.is_new else self.settled + 1
        kept = [] if self.is_new else [item for item in agreed if not self._is_idle(item)]
        if not self.is_new and len(kept) < len(agreed):
            self.sent[kind] = parameters_in(kept) | {self.flags}
        self.pending.clear()
        self._forget_step()
        # As they came when the ranks met; if that did not do, as DDP supposes that they come; if
        # that did not either, as they came then; and so on.
        return sorted(kept, key=LaunchList.order, reverse=True) if self.reorders % 2 else kept

    def _is_idle(self, launches: LaunchList) -> bool:
        numbers = launches.parameters - {self.flags}
        return bool(numbers) and all(self.idle.get(n, 0) >= _IDLE_ROUNDS for n in numbers)

    def fail_round(self) -> None:
        """The round has ended with an error: the ranks meet before they send anything again."""
        self._forget_step()
        self.sent.clear()
        self.idle.clear()
        self.parts.clear()
        self.settled = self.reorders = 0

    def _forget_step(self) -> None:
        self.averages.clear()
        self.used, self.reached = None, frozenset()
        self.is_new = self.is_out_of_order = False
