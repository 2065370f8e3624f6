"""A run that is terminated ends as one that is interrupted."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""Exit status of a run that was interrupted, as a shell's."""


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Clean up and write what was found also if this process is terminated, or its terminal is
    gone."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
