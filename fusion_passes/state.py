"""All state of the package in a process: each piece is declared once, and all are reset together.

A file keeps its own piece in a global variable of the piece's own type, and reads it directly::

    participants: Final = process_state.keep(
        dict[str, Profile](), "...", Lifetime.MODULE, reset=dict.clear
    )

``tests/test_state.py`` fails on a mutable global of the package that is not declared this way, and
on entries that outlive the object they describe.
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
    """One piece of state.

    Attributes:
        value: the object that holds the state; it is never replaced by another.
        holds: description of the value, for people.
        lives: how long an entry is kept; the longest time, if the value has several tables.
        reset: function that sets the value back to its state after the import of the package.
    """

    value: _T
    holds: str
    lives: Lifetime
    reset: Callable[[_T], None]


class ProcessState:
    """All pieces of the package's state in the order of their declaration, which is import order:
    the pieces of a file come after those of the files that it imports."""

    def __init__(self) -> None:
        self.pieces: list[Piece[object]] = []

    def keep(self, value: _T, holds: str, lives: Lifetime, *, reset: Callable[[_T], None]) -> _T:
        """Declare a :class:`Piece`. Return ``value``, which the caller keeps in a global."""
        # mypy: ``reset`` of a piece is only called with the value of the same piece.
        self.pieces.append(Piece(value, holds, lives, reset))  # type: ignore[arg-type]
        return value

    def once(self, holds: str) -> Callable[[Callable[[], _T]], Callable[[], _T]]:
        """Declare a function that runs once in a process and whose result is cached. ``holds``
        describes the result, for people."""

        def declare(function: Callable[[], _T]) -> Callable[[], _T]:
            cached = functools.cache(function)
            self.keep(cached, holds, Lifetime.PROCESS, reset=lambda cached: cached.cache_clear())
            return cached

        return declare

    def reset(self) -> None:
        """Set all state back to what it was after the import of the package: for a test, or for a
        process that starts over, for example after a fork.

        The changes that the flag made in torch are undone first, and the flag gets the
        environment's value. A managed DDP module that still exists cannot train any more: its
        forward raises an error. Changes that ``docs/patches.md`` lists as permanent stay; making
        them again changes nothing. All ranks of a process group that stays in use must reset
        together.

        Raises:
            RuntimeError: a backward runs, or a graph is being compiled. Nothing was reset.
        """
        # In reverse order: install/switch.py imports all other files with state, so its piece comes
        # first. It raises the error, and undoes its patches before the state that they use is gone.
        for piece in reversed(self.pieces):
            piece.reset(piece.value)


process_state: Final = ProcessState()
"""The state of this process."""
