"""Runs torch's own tests of DistributedDataParallel under the flag if they pass without it, and
fails if one ends differently.

The tests are those of the installed torch (``torch/testing/_internal/distributed``), over Gloo on
the CPU, each in its own processes; tests that need GPUs are rewritten for the CPU. Each is run with
uncompiled models and with compiled DDP modules, in both modes. This is a pytest run with pytest's
options: skipped tests do not pass without the flag, and ``xfail`` marks a difference listed in
tools/torch_tests_run/known.json with its reason.

    python tools/torch_tests.py
    python tools/torch_tests.py -k 'no_sync and as-is and concat' --collect-only -q
    python tools/torch_tests.py -n 2 --junitxml=results.xml
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command_line import ROOT, run_pytest

TESTS = Path(__file__).parent / "torch_tests_run" / "test_ddp.py"


def main(arguments: Sequence[str]) -> int:
    """Run tests, with options for pytest; 0 if there is no unknown difference."""
    # The caller's path comes first: it may be another copy of the package.
    sys.path.insert(1 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT))
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        # The warning filters in pyproject.toml import the package, which runs without the flag must
        # not have.
        options = ["--dist", "loadgroup", "-p", "no:warnings"]
        return run_pytest(TESTS, [*options, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
