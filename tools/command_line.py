"""Common code of the commands: the path of ``testing/``, their help, and interrupts."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""The folder that contains testing/ and tools/, which no installed package has."""

sys.path.append(str(ROOT))  # Appended last: an installed package takes precedence.

INTERRUPTED: Final = 130
"""Exit status of an interrupted run, as in a shell."""

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a tool's docstring, unchanged."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def exit_on_signals() -> None:
    """Make an interrupt, a termination and a hangup of the terminal exit the program normally, so
    that it cleans up and prints its results: all ``finally`` blocks run."""

    def end(_: int, __: FrameType | None) -> None:
        sys.exit(INTERRUPTED)

    for number in ENDING:
        signal.signal(number, end)


def run_pytest(file: Path, arguments: Sequence[str]) -> int:
    """Run the tests of a file, with options for pytest. On termination, tests clean up as on an
    interrupt."""
    import pytest

    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    return int(pytest.main([str(file), *arguments]))
