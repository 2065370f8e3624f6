"""A progress bar of turns."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress:
    """Counts turns, whose number becomes known with the work; use it in a ``with``."""

    def __init__(self) -> None:
        self._bar: Any = tqdm(total=0, unit="turn", smoothing=0.05)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def expect(self, turns: int) -> None:
        """Add turns to those that are to come."""
        self._bar.total += turns
        self._bar.refresh()

    def begin(self, words: str) -> None:
        """Say what runs now, which is a turn."""
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update()
