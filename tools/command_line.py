"""What the commands share: where ``testing/`` is, their help, and how they are interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""In which testing/ is beside tools/; no installed package has it."""

sys.path.append(str(ROOT))  # Last: what is installed counts.

INTERRUPTED: Final = 130
"""Exit status of a run that was interrupted, as a shell's."""

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a tool's docstring, as it stands there."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def exit_on_signals() -> None:
    """Have an interrupt, a termination and the end of the terminal exit the program, so that it
    cleans up and says what it has found: whatever stands in ``finally``."""

    def end(_: int, __: FrameType | None) -> None:
        sys.exit(INTERRUPTED)

    for number in ENDING:
        signal.signal(number, end)


def run_pytest(file: Path, arguments: Sequence[str]) -> int:
    """Run the tests of a file, with options for pytest. Where the run is terminated, tests clean up
    as where it is interrupted."""
    import pytest

    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    return int(pytest.main([str(file), *arguments]))
