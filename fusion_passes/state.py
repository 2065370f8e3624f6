"""All that the package remembers in a process: each piece declared once, and all put back at once.

A room keeps its own piece in a module global of the piece's own type, which it reads directly::

    participants: Final = process_state.keep(
        dict[str, Profile](), "...", Lifetime.MODULE, reset=dict.clear
    )

``tests/test_state.py`` fails on a mutable global of the package that is not declared so, and on
entries that outlive what they are about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")


class Lifetime(Enum):
    """How long an entry of a piece is kept."""

    MODULE = "until the DDP module that it is about is freed"
    GROUP = "until the process group that it is about is freed"
    PROCESS = "until the process ends"


@dataclass(frozen=True)
class Piece(Generic[_T]):
    """Something that the package remembers.

    Attributes:
        value: what its room keeps; always this object.
        holds: what that is, for people.
        lives: how long an entry is kept. The longest, where a value has several tables.
        reset: makes the value what it was when the package had been imported.
    """

    value: _T
    holds: str
    lives: Lifetime
    reset: Callable[[_T], None]


class ProcessState:
    """All pieces of the package's state, in the order of their declaration: a room's come after
    those that it imports."""

    def __init__(self) -> None:
        self.pieces: list[Piece[object]] = []

    def keep(self, value: _T, holds: str, lives: Lifetime, *, reset: Callable[[_T], None]) -> _T:
        """Declare a piece, as :class:`Piece` has it. Return ``value``, for the room's global."""
        # A piece takes what it holds itself, and nothing else.
        self.pieces.append(Piece(value, holds, lives, reset))  # type: ignore[arg-type]
        return value

    def once(self, holds: str) -> Callable[[Callable[[], _T]], Callable[[], _T]]:
        """Declare a function that is called once in a process, and remembers what it returns
        (``holds``: what that is, for people)."""

        def declare(function: Callable[[], _T]) -> Callable[[], _T]:
            cached = functools.cache(function)
            self.keep(cached, holds, Lifetime.PROCESS, reset=lambda cached: cached.cache_clear())
            return cached

        return declare

    def reset(self) -> None:
        """Bring the process to where it was when the package had been imported: for a test, or a
        process that starts anew, as after a fork.

        What the flag has changed in torch is undone first, and the flag is what the environment
        says. A DDP module that is still there and was managed cannot train any more: its forward
        raises an error. What ``docs/patches.md`` lists as made for good stays; making it again
        changes nothing. All ranks of a process group that is used further must do this together.

        Raises:
            RuntimeError: a backward runs, or a graph is being compiled. Nothing was put back.
        """
        # Last come, first gone: the switch imports all others, refuses, and undoes its patches
        # before anything that they call is forgotten.
        for piece in reversed(self.pieces):
            piece.reset(piece.value)


process_state: Final = ProcessState()
"""The one of this process."""
