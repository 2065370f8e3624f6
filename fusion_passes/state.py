"""All state of the package in a process: each piece is declared once.

A file keeps its own piece in a global variable of the piece's own type, and reads it directly::

    participants: Final = process_state.keep(dict[str, Profile](), "...", Lifetime.MODULE)

``tests/test_state.py`` fails on a mutable global of the package that is not declared this way, and
on entries that outlive the object they describe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

_T = TypeVar("_T")


class Lifetime(Enum):
    """How long an entry of a piece is kept."""

    MODULE = "until the DDP module that it is about is freed"
    GROUP = "until the process group that it is about is freed"
    PROCESS = "until the process ends"


@dataclass(frozen=True)
class Piece:
    """One piece of state.

    Attributes:
        value: the object that holds the state; it is never replaced by another.
        holds: description of the value, for people.
        lives: how long an entry is kept; the longest time, if the value has several tables.
    """

    value: object
    holds: str
    lives: Lifetime


class ProcessState:
    """All pieces of the package's state in the order of their declaration, which is import order:
    the pieces of a file come after those of the files that it imports."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def keep(self, value: _T, holds: str, lives: Lifetime) -> _T:
        """Declare a :class:`Piece`. Return ``value``, which the caller keeps in a global."""
        self.pieces.append(Piece(value, holds, lives))
        return value

    def once(self, holds: str) -> Callable[[Callable[[], _T]], Callable[[], _T]]:
        """Declare a function that runs once in a process and whose result is cached. ``holds``
        describes the result, for people."""

        def declare(function: Callable[[], _T]) -> Callable[[], _T]:
            cached = functools.cache(function)
            return self.keep(cached, holds, Lifetime.PROCESS)

        return declare


process_state: Final = ProcessState()
"""The state of this process."""
