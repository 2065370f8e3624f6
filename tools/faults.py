"""Injects faults into small trainings over Gloo, with the flag and without, and fails where the
flag makes it worse: a hang, an error that comes later or hides another, something left behind.

Each scenario runs with eager DDP and with stock torch.compile(ddp), then under each mode of the
flag. This is a run of pytest, with its options: ``-rP`` also shows what became of the ranks of a
scenario that passes.

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
