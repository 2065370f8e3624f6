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
    """Clean up and write what was found also if this process is terminated."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
