"""Runs torch's own tests of DistributedDataParallel without and under the flag, and shows which end
otherwise.

The tests are those of the installed torch (``torch/testing/_internal/distributed``), over Gloo on
the CPU, each in processes of its own; those that ask for GPUs are rewritten for the CPU. Each is
run with the models as they are and with DDP's modules compiled, the flag off and, where it passes
so, in both modes. tools/torch_tests_run/known.json has the differences that are known, with their
reasons; the exit status is 1 if there is another one.

    python tools/torch_tests.py
    python tools/torch_tests.py --models as-is --mode concat
    python tools/torch_tests.py --select '*no_sync*' --list
    python tools/torch_tests.py --output results.json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from command_line import ROOT, exit_on_signals, parser_of
from torch_tests_run.comparing import (
    MODELS,
    MODES,
    OFF,
    Known,
    Outcome,
    Run,
    as_json,
    compare,
    no_longer,
    read_known,
    summary,
)
from torch_tests_run.running import prepare, run_one
from torch_tests_run.source import TorchTest, ddp_tests, source_path

KNOWN = Path(__file__).parent / "torch_tests_run" / "known.json"
TIMEOUT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests; 1 if one fails under the flag and that is not known."""
    parser = _parser()
    options = parser.parse_args(arguments)
    patterns = options.select or ["*"]
    tests = [
        test
        for test in ddp_tests(source_path().read_text())
        if any(fnmatchcase(test.name, pattern) for pattern in patterns)
    ]
    if not tests:
        parser.error(f"no test has a name like {' or '.join(patterns)}")
    if options.list:
        print("\n".join(f"{test.name} ({test.ranks} ranks)" for test in tests))
        return 0
    known, outcomes = read_known(KNOWN), dict[Run, Outcome]()

    def finish(run: Run, outcome: Outcome) -> None:
        outcomes[run] = outcome
        words = f": {outcome.words}" if outcome.words else ""
        print(f"{run}: {outcome.kind} ({outcome.seconds:.0f} s){words}", flush=True)
        if options.output:
            options.output.write_text(as_json(outcomes, known))

    try:
        _run(tests, options, finish)
    finally:
        is_new = _show(outcomes, known)
    return int(is_new)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--select", action="append", default=[], metavar="PATTERN", help="tests, by name")
    add("--mode", action="append", choices=MODES[1:], help="of the flag (both)")
    add("--models", action="append", choices=MODELS, help="as they are or compiled (both)")
    add("--list", action="store_true", help="print the names of the tests, run nothing")
    add("--timeout", type=float, default=TIMEOUT_S, help=f"s for each run ({TIMEOUT_S:g})")
    add("--output", type=Path, metavar="FILE", help="write what was found as JSON")
    add("--logs", type=Path, metavar="DIRECTORY", help="keep what the tests print")
    return parser


def _run(
    tests: Sequence[TorchTest],
    options: argparse.Namespace,
    finish: Callable[[Run, Outcome], None],
) -> None:
    """Run each test without the flag and, if it passes so, under it."""
    # What the caller has put in front comes first: it may be another copy of the package.
    sys.path.insert(1 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT))
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as directory:
        logs = options.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        prepare(Path(directory) / "cache", options.timeout)
        for models in options.models or MODELS:
            for test in tests:
                passes = True
                for mode in (OFF, *(options.mode or MODES[1:])):
                    run, outcome = Run(test.name, models, mode), Outcome("not run")
                    if passes:
                        outcome = run_one(run, test.ranks, logs=logs, timeout_s=options.timeout)
                    if mode == OFF:
                        passes = outcome.kind == "passed"
                    finish(run, outcome)


def _show(outcomes: dict[Run, Outcome], known: Sequence[Known]) -> bool:
    """Print what differs; whether any of it is not known."""
    comparisons = compare(outcomes, known)
    for it in sorted(comparisons, key=lambda it: it.verdict):
        if it.verdict in ("known", "new"):
            print(f"{it.verdict}: {it}" + (f"\n    {it.reason}" if it.reason else ""))
    for entry in no_longer(comparisons, known):
        print(f"no longer differs: {entry.test} [{entry.models}, {entry.mode}]: {entry.reason}")
    print("\ntorch's own DDP tests under the flag beside those without:\n")
    for words, count in sorted(summary(comparisons).items()):
        print(f"{words}: {count}")
    return any(comparison.verdict == "new" for comparison in comparisons)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
