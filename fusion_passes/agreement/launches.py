"""What a rank is going to launch for a DDP module: the one type that ranks compare, and its text.

The text is an argument of an operator in the compiled graph, it is what ranks exchange over the
store, and it is what an error shows. Nobody else reads or writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from fusion_passes.state import Lifetime, process_state

LATE: Final = "late"
"""The mode of collectives that no graph launches: they follow the backward, bucket by bucket."""

FOLLOWS: Final = "follows"
"""The mode of what a rank without inputs offers: it runs, by hand, what others do."""

_LATER: Final = "later "
_FOREIGN: Final = "foreign "

Divided: TypeAlias = Literal["before", "by", "after", "hook", "rows"]
"""Where gradients are divided by the number of ranks: before the collective, by it, or after it;
``"hook"`` where a communication hook does whatever it does in the place of the collective;
``"rows"`` where sparse gradients are gathered as rows, divided before."""

_OPERATIONS: Final[Mapping[Divided, str]] = MappingProxyType(
    {"before": "sum", "by": "avg", "after": "sum/after", "hook": "hook", "rows": "rows"}
)


@dataclass(frozen=True)
class Collective:
    """One all-reduce of a DDP module's gradients, or one exchange of rows of sparse ones.

    Attributes:
        divided: where gradients are divided by the number of ranks.
        dtype: in which they are sent, without ``torch.``.
        parameters: numbers of the parameters, in the order in which they lie in the bucket.
        place: index among all launches of the graph for DDP modules on the same process group.
        behind: how many foreign collectives (that are not DDP's) the graph launches before it, on
            the same process group.
    """

    divided: Divided
    dtype: str
    parameters: tuple[int, ...]
    place: int
    behind: int = 0


@dataclass(frozen=True)
class LaunchList:
    """What one graph launches for one DDP module, in order.

    Two ranks whose lists are equal run collectives that match.

    Attributes:
        mode: ``"concat"`` or ``"coalesced"``; :data:`LATE` where no graph launches them;
            :data:`FOLLOWS` where a rank has none of its own.
        collectives: in the order of their launches.
        later: gradients that the graph gives and does not launch, each by itself: they follow the
            backward. No part of what ranks compare here: they do when it has ended.
        foreign: how many foreign collectives the graph launches on the process group; of a
            :data:`LATE` one, the backward. No part of what ranks compare: the same ones may lie in
            other graphs on each.
    """

    mode: str
    collectives: tuple[Collective, ...]
    later: tuple[Collective, ...] = field(default=(), compare=False)
    foreign: int = field(default=0, compare=False)

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Numbers of all parameters whose gradients are reduced."""
        return frozenset(n for item in self.collectives for n in item.parameters)

    @functools.cached_property
    def buckets(self) -> tuple[Collective, ...]:
        """The collectives that reduce a bucket: all but those that gather rows."""
        return tuple(item for item in self.collectives if item.divided != "rows")

    @functools.cached_property
    def for_hook(self) -> tuple[tuple[int, ...], ...]:
        """The parameters of each bucket, if they are given to a communication hook; else empty."""
        calls_hook = any(item.divided == "hook" for item in self.collectives)
        return tuple(item.parameters for item in self.collectives) if calls_hook else ()

    def order(self) -> int:
        """The greater, the earlier a backward has given all of the gradients, if it takes the
        parameters in the opposite order of their registration, as DDP supposes."""
        return min(self.parameters, default=-1)

    def is_overtaken(self, foreign: int) -> bool:
        """Whether by hand, at the end of a backward, these would be launched behind foreign
        collectives that a graph launches after them.

        Args:
            foreign: how many there are, from the beginning of the graph on.
        """
        return self.mode != LATE and any(item.behind < foreign for item in self.collectives)

    def may_become(self, other: LaunchList, *, all_are_sent: bool) -> bool:
        """Whether ranks that have agreed on this list may all come to run another one in its place.

        Args:
            other: what one of them is about to launch.
            all_are_sent: whether each rank sends zeros for what it lacks.
        """
        if self.for_hook != other.for_hook:
            return False  # A hook may know the sizes that it has seen.
        if self.parameters == other.parameters:  # The same buckets can be launched from elsewhere.
            return self.mode == LATE or bool(self.for_hook)
        return not all_are_sent

    def renumbered(self, numbers: Mapping[int, int]) -> LaunchList:
        """The same collectives of other parameters.

        Args:
            numbers: for each parameter's, the other one's.
        """

        def of_others(items: Iterable[Collective]) -> tuple[Collective, ...]:
            return tuple(
                replace(item, parameters=tuple(numbers[number] for number in item.parameters))
                for item in items
            )

        return replace(self, collectives=of_others(self.collectives), later=of_others(self.later))

    def encode(self) -> str:
        """One line; :meth:`decode` reads it. ``"concat; avg float32 1-0; sum bfloat16 2"``."""
        items = [self.mode]
        for index, item in enumerate(self.collectives):
            place = f"@{item.place} " if item.place != index else ""
            behind = f"+{item.behind} " if item.behind else ""
            items.append(f"{place}{behind}{_text_of(item)}")
        items += [f"{_LATER}{_text_of(item)}" for item in self.later]
        items += [f"{_FOREIGN}{self.foreign}"] if self.foreign else []
        return "; ".join(items)

    @staticmethod
    def decode(text: str) -> LaunchList:
        """The list that :meth:`encode` wrote."""
        return _decode(text)

    def describe(self, names: Sequence[str]) -> str:
        """The list for people, with the parameters' names."""
        buckets = [
            f"[{shown_list(names[n] for n in item.parameters)}] in {item.dtype} by "
            f"{_OPERATIONS[item.divided]}"
            for item in self.collectives
        ]
        if self.mode == FOLLOWS:
            return "what the others run: it has no inputs left"
        how = "after its backward" if self.mode == LATE else f"mode {self.mode!r}"
        return f"{how}, {len(buckets)} collectives: {shown_list(buckets)}"


def parameters_in(lists: Iterable[LaunchList]) -> frozenset[int]:
    """The numbers of all parameters in any of the lists."""
    return frozenset[int]().union(*(item.parameters for item in lists))


@process_state.once("decoded launch lists", Lifetime.PROCESS, max_results=256)
def _decode(text: str) -> LaunchList:
    mode, *items = text.split("; ")
    collectives, later, foreign = [], [], 0
    for index, item in enumerate(items):
        if item.startswith(_LATER):
            later.append(_read(item.removeprefix(_LATER), 0))
        elif item.startswith(_FOREIGN):
            foreign = int(item.removeprefix(_FOREIGN))
        else:
            collectives.append(_read(item, index))
    return LaunchList(mode, tuple(collectives), tuple(later), foreign)


def _text_of(item: Collective) -> str:
    return f"{_OPERATIONS[item.divided]} {item.dtype} {number_runs(item.parameters)}"


def _read(text: str, place: int) -> Collective:
    """The collective of which :func:`_text_of` made a text, after its place and what it is behind,
    where these are not the usual ones."""
    *order, operation, dtype, numbers = text.split(" ")
    given = {item[0]: int(item[1:]) for item in order}
    divided: dict[str, Divided] = {name: key for key, name in _OPERATIONS.items()}
    parameters = tuple(numbers_in(numbers))
    return Collective(
        divided[operation], dtype, parameters, given.get("@", place), given.get("+", 0)
    )


def number_runs(numbers: Iterable[int]) -> str:
    """``[5, 4, 3, 7, 8]`` as ``"5-3,7-8"``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first, last = runs[-1] if runs else (number, number + 2)
        step = number - last
        if abs(step) == 1 and (last - first) * step >= 0:
            runs[-1] = (first, number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers_in(runs: str) -> list[int]:
    """What :func:`number_runs` was given."""
    numbers: list[int] = []
    for run in runs.split(",") if runs else []:
        first, _, last = run.partition("-")
        start, end = int(first), int(last or first)
        step = 1 if end >= start else -1
        numbers.extend(range(start, end + step, step))
    return numbers


_SHOWN: Final = 5
"""How many items of a list are shown to people."""


def shown_list(items: Iterable[str]) -> str:
    """The first few items, and how many more there are."""
    shown = list(items)
    rest = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
