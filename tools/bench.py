"""What the package costs and gains, beside what torch does: one bench of two parts.

    python tools/bench.py --quick      # training steps, in under 3 minutes, to see that it runs
    python tools/bench.py steps        # a training step under each method to reduce gradients
    python tools/bench.py starts       # a cold start, a warm start and a step, in CPU seconds

Without a name it is the steps. ``python tools/bench.py PART --help`` lists the options of a part.
Each prints its page; ``--output DIR`` keeps what was measured as ``DIR/PART.json`` and the page as
``DIR/PART.md``. docs/bench.md says what the figures mean.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

from command_line import exit_on_signals

DEFAULT: Final = "steps"
PARTS: Final = (DEFAULT, "starts")
"""Each a module of :mod:`benches`, imported when it is asked for."""

WRONG_USE: Final = 2
"""Exit status of a command line that is off, as argparse's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part of the bench; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    name = given.pop(0) if given and not given[0].startswith("-") else DEFAULT
    if name not in PARTS:
        print(f"The bench has no part {name}. Choose of {', '.join(PARTS)}.", file=sys.stderr)
        return WRONG_USE
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"benches.{name}").main
    return run(given)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
