"""What the commands share: where ``testing/`` is, their help, and how they are interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""In which testing/ is beside tools/; no installed package has it."""

sys.path.append(str(ROOT))  # Last: what is installed counts.

INTERRUPTED: Final = 130
"""Exit status of a run that was interrupted, as a shell's."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a tool's docstring, as it stands there."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


class Interruptible:
    """A block that is ended by an interrupt, by being terminated, or with its terminal: it cleans
    up, and what stands behind it writes what was found.

    Attributes:
        status: :data:`INTERRUPTED` if the block was ended so; else 0.
    """

    status = 0

    def __enter__(self) -> Interruptible:
        def interrupt(_: int, __: FrameType | None) -> None:
            raise KeyboardInterrupt

        signals = (signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, interrupt) for number in signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.status = INTERRUPTED if kind is KeyboardInterrupt else 0
        return bool(self.status)
