"""What the commands share: where ``testing/`` is, their help, and how they are interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
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
