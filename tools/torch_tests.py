"""Runs torch's own tests of DistributedDataParallel without and under the flag, and shows which end
otherwise.

The tests are those of the installed torch (``torch/testing/_internal/distributed``), over Gloo on
the CPU, each in processes of its own; those that ask for GPUs are rewritten for the CPU. Each is
run with the models as they are and with DDP's modules compiled, the flag off and in both modes.
tools/torch_tests_run/known.json has the differences that are known, with their reasons; the exit
status is 1 if there is another one.

    python tools/torch_tests.py
    python tools/torch_tests.py --models as-is --mode concat
    python tools/torch_tests.py --select '*no_sync*' --list
    python tools/torch_tests.py --output results.json
    python tools/torch_tests.py --reference results.json    # takes runs without the flag from it
    python tools/torch_tests.py --resume results.json       # takes all runs from it
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from command_line import parser_of
from interrupting import INTERRUPTED, terminated_as_interrupted
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
    read_outcomes,
    summary,
)
from torch_tests_run.processes import Processes
from torch_tests_run.source import TorchTest, ddp_tests, source_path

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "tools" / "torch_tests_run" / "known.json"
TIMEOUT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests; 1 if one fails under the flag and that is not known, 130 if interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    tests = _select(ddp_tests(source_path().read_text()), options.select)
    if not tests:
        parser.error(f"no test has a name like {' or '.join(options.select)}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, but is {options.jobs}")
    if options.list:
        print("\n".join(f"{test.name} ({test.ranks} ranks)" for test in tests))
        return 0
    return _run(tests, options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--select", action="append", default=[], metavar="PATTERN", help="tests, by name")
    add("--mode", action="append", choices=MODES[1:], help="of the flag (both)")
    add("--models", action="append", choices=MODELS, help="as they are or compiled (both)")
    add("--list", action="store_true", help="print the names of the tests, run nothing")
    add("--jobs", type=int, default=1, help="tests at a time (1), each with 2 to 4 ranks")
    add("--timeout", type=float, default=TIMEOUT_S, help=f"s for each run ({TIMEOUT_S:g})")
    add("--output", type=Path, metavar="FILE", help="write what was found as JSON")
    add("--logs", type=Path, metavar="DIRECTORY", help="keep what the tests print")
    add("--reference", type=Path, metavar="FILE", help="an --output: do only runs under the flag")
    add("--resume", type=Path, metavar="FILE", help="an --output: do only what it lacks")
    return parser


def _select(tests: list[TorchTest], patterns: Sequence[str]) -> list[TorchTest]:
    return [
        test
        for test in tests
        if not patterns or any(fnmatchcase(test.name, pattern) for pattern in patterns)
    ]


def _run(tests: list[TorchTest], options: argparse.Namespace) -> int:
    known = read_known(KNOWN)
    version = importlib.metadata.version("torch").partition("+")[0]
    modes = (OFF, *(options.mode or MODES[1:]))
    runs = {
        Run(test.name, models, mode): test.ranks
        for models in options.models or MODELS
        for test in tests
        for mode in modes
    }
    outcomes = {run: it for run, it in _done(options, version).items() if run in runs}
    # What the caller has put in front comes first: it may be another copy of the package.
    sys.path.insert(1 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT))

    def finish(run: Run, outcome: Outcome) -> None:
        outcomes[run] = outcome
        words = f": {outcome.words}" if outcome.words else ""
        print(f"{len(outcomes)}/{len(runs)} {run}: {outcome.kind} ({outcome.seconds:.0f} s){words}")
        sys.stdout.flush()
        if options.output:
            options.output.write_text(as_json(outcomes, known, version))

    try:
        with terminated_as_interrupted():
            _run_rest(runs, outcomes, options, finish)
    except KeyboardInterrupt:
        _warn(outcomes, known, version)
        return INTERRUPTED
    return _warn(outcomes, known, version)


def _done(options: argparse.Namespace, version: str) -> dict[Run, Outcome]:
    """Return the outcomes that the caller has from before."""
    done = {}
    if options.reference:
        read = read_outcomes(options.reference, version)
        done = {run: outcome for run, outcome in read.items() if run.mode == OFF}
    return done | (read_outcomes(options.resume, version) if options.resume else {})


def _run_rest(
    runs: dict[Run, int],
    outcomes: dict[Run, Outcome],
    options: argparse.Namespace,
    finish: Callable[[Run, Outcome], None],
) -> None:
    """Run what has no outcome yet: first without the flag, then what has passed so."""
    rest = {run: ranks for run, ranks in runs.items() if run not in outcomes}
    with tempfile.TemporaryDirectory(prefix="torch-tests-logs-") as unkept:
        processes = Processes(options.logs or Path(unkept), options.timeout, options.jobs)
        processes.run({run: ranks for run, ranks in rest.items() if run.mode == OFF}, finish)
        for run in rest:
            if run.mode != OFF and outcomes[run.reference].kind != "passed":
                finish(run, Outcome("not run"))
        processes.run({run: ranks for run, ranks in rest.items() if run not in outcomes}, finish)


def _warn(outcomes: dict[Run, Outcome], known: Sequence[Known], version: str) -> int:
    comparisons = compare(outcomes, known)
    for verdict in ("known", "new"):
        for comparison in comparisons:
            if comparison.verdict == verdict:
                print(f"{verdict}: {comparison}")
                if comparison.reason:
                    print(f"    {comparison.reason}")
    for entry in no_longer(comparisons, known):
        print(f"no longer differs: {entry.test} [{entry.models}, {entry.mode}]: {entry.reason}")
    print(f"\ntorch {version}, torch's own DDP tests under the flag beside those without:\n")
    print(summary(comparisons))
    return int(any(comparison.verdict == "new" for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
