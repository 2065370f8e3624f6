"""Which parameters take part in a step, where ranks may use others in each
(``find_unused_parameters=True``).

All ranks send the same gradients all the same: those that some rank has used up to now. What a
rank has not used, it sends as zeros, or as the gradient that it has kept. With them go the *flags*,
one number a parameter: whether this rank has used it. So every rank knows after the backward which
parameters any has used, with no collective more, and all of them decide alike on what follows: a
parameter that none has used keeps its gradient, or has none; one that is new is reduced by one more
collective, and belongs to the others from then on.

Where a backward consists of several graphs, each sends the flags of its own parameters: one is used
if any of them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from fusion_passes.agreement.launches import LaunchList, parameters_in

_IDLE_ROUNDS: Final = 8
"""After so many rounds in which no rank has used a part of the backward, nobody sends it: a step
with zeros costs its bytes, and a rank that comes to use it again a round that is not overlapped."""


@dataclass
class Usage:
    """What a module's ranks know of the parameters that they use.

    Attributes:
        trained: numbers of the parameters that can have a gradient, in order.
        flags: the number under which the flags are sent, one for each of ``trained``.
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
        is_in_parts: whether a graph has stayed on this rank that was a part of its backward.
        is_new: whether the ranks have only learnt in this round what they send.
        idle: for how many rounds no rank has used a parameter, by its number; the same on all.
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
    is_new: bool = False
    idle: dict[int, int] = field(default_factory=dict)

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

    def is_absent(self, launches: LaunchList) -> bool:
        """Whether the backward that runs reaches none of the parameters of a list: this rank can
        send zeros for it whatever else it launches. A communication hook takes all at once."""
        return not self.sends_all and launches.parameters.isdisjoint(self.reached)

    def own_use(self, received: Iterable[int]) -> frozenset[int]:
        """What this rank has used in a round with these gradients."""
        return frozenset(self.pending).union(received)

    def flags_of(self, used: Iterable[int]) -> list[float]:
        """The flags, one for each of ``trained``, of a rank that has used these parameters."""
        found = frozenset(used)
        return [float(number in found) for number in self.trained]

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

    def read(self, flags: Tensor) -> None:
        """Note which parameters some rank has used.

        Args:
            flags: whether some rank has used it, by parameter; on a GPU, this waits for it.
        """
        values: Sequence[float] = flags.tolist()
        self.used = frozenset(n for n, v in zip(self.trained, values, strict=True) if v)

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
        kept = [] if self.is_new else [item for item in agreed if not self._is_idle(item)]
        if not self.is_new and len(kept) < len(agreed):
            self.sent[kind] = parameters_in(kept) | {self.flags}
        self.pending.clear()
        self._forget_step()
        return kept

    def _is_idle(self, launches: LaunchList) -> bool:
        numbers = launches.parameters - {self.flags}
        return bool(numbers) and all(self.idle.get(n, 0) >= _IDLE_ROUNDS for n in numbers)

    def fail_round(self) -> None:
        """The round has ended with an error: the ranks meet before they send anything again."""
        self._forget_step()
        self.sent.clear()
        self.idle.clear()

    def _forget_step(self) -> None:
        self.averages.clear()
        self.used, self.is_new, self.reached = None, False, frozenset()
