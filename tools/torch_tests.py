"""Runs torch's own tests of DistributedDataParallel under the flag where they pass without it, and
fails where one ends otherwise.

The tests are those of the installed torch (``torch/testing/_internal/distributed``), over Gloo on
the CPU, each in processes of its own; those that ask for GPUs are rewritten for the CPU. Each is
run with the models as they are and with DDP's modules compiled, in both modes. This is a run of
pytest, with its options: what is skipped does not pass without the flag, and ``xfail`` stands for a
difference that tools/torch_tests_run/known.json has, with its reason.

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
    """Run tests, with options for pytest; 0 if none differs that is not known."""
    # What the caller has put in front comes first: it may be another copy of the package.
    sys.path.insert(1 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT))
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        # The filters of warnings in pyproject.toml import the package, which runs without the flag
        # must not have.
        options = ["--dist", "loadgroup", "-p", "no:warnings"]
        return run_pytest(TESTS, [*options, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
