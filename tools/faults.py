"""Injects faults into small trainings over Gloo, with the flag and without, and fails if the flag
makes the result worse: a hang, an error that is later or hides another one, or leftovers.

Each scenario runs with eager DDP and with stock torch.compile(ddp), then under each mode of the
flag. This is a pytest run with pytest's options: ``-rP`` also shows the ranks of scenarios that
pass.

    python tools/faults.py                            # all: hours
    python tools/faults.py -k 'kill and concat'
    python tools/faults.py -k starts-and-ends-0 -rP
    python tools/faults.py --collect-only -q
"""

from __future__ import annotations

import sys
from pathlib import Path

from command_line import run_pytest

TESTS = Path(__file__).parent / "fault_runs" / "test_faults.py"

if __name__ == "__main__":
    sys.exit(run_pytest(TESTS, sys.argv[1:]))
