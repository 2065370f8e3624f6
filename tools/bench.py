"""What the package costs and gains, beside what torch does: see :mod:`benches.steps`."""

import sys

from benches.steps import main
from command_line import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
