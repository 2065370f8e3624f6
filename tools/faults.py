"""Injects faults into small trainings over Gloo, with the flag and without, and shows where the
flag makes it worse: a hang, an error that comes later or hides another, something left behind.

Each scenario runs with eager DDP and with stock torch.compile(ddp), then under each mode of the
flag. A table is printed at the end, and written with all that was recorded; the exit status is 1 if
a rule was broken. Some scenarios mount a small file system, and are skipped where that is not
permitted.

    python tools/faults.py                            # all: hours
    python tools/faults.py --quick                    # a few
    python tools/faults.py --select 'kill-*' --mode concat
    python tools/faults.py --list
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from command_line import parser_of
from fault_runs.catalog import SCENARIOS
from fault_runs.running import Runner, Verdict
from fault_runs.scenarios import MODES, PEERS, Scenario, Way, select
from fault_runs.table import as_markdown, lines_of
from interrupting import INTERRUPTED, terminated_as_interrupted

QUICK_REPEATS = 3


def main(arguments: Sequence[str] | None = None, scenarios: Sequence[Scenario] = SCENARIOS) -> int:
    """Run scenarios; 1 if one broke a rule, 130 if interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        chosen = select(scenarios, options.select, quick=options.quick)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(scenario.name for scenario in chosen))
        return 0
    repeats = options.repeats or (QUICK_REPEATS if options.quick else None)
    if repeats:
        chosen = [dataclasses.replace(s, repeats=repeats if s.repeats > 1 else 1) for s in chosen]
    modes: list[Way] = [options.mode] if options.mode else list(MODES)
    output = options.output or Path(time.strftime("faults-%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    status = 0
    try:
        with terminated_as_interrupted():
            _run(chosen, modes, options, output, verdicts)
    except KeyboardInterrupt:
        status = INTERRUPTED
    (output / "report.md").write_text(as_markdown(verdicts))
    print(as_markdown(verdicts))
    return status or int(any(verdict.violations for verdict in verdicts))


def _run(
    chosen: Sequence[Scenario],
    modes: Sequence[Way],
    options: argparse.Namespace,
    output: Path,
    verdicts: list[Verdict],
) -> None:
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        caches = options.caches or Path(directory) / "caches"
        caches.mkdir(parents=True, exist_ok=True)
        peers = [options.peer] if options.peer else list(PEERS)
        runner = Runner(Path(directory), caches, output, peers)
        for number, scenario in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {scenario.name}", flush=True)
            for verdict in runner.verdicts(scenario, modes):
                verdicts.append(verdict)
                print("\n".join(lines_of(verdict)), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--select", action="append", default=[], metavar="GLOB", help="scenarios by name")
    add("--mode", choices=MODES, help="one mode of the flag (both)")
    add("--peer", choices=PEERS, help="one peer (both): quicker, and stricter")
    add("--quick", action="store_true", help="a few scenarios")
    add("--list", action="store_true", help="print the names of the scenarios, run nothing")
    add("--repeats", type=int, help="of scenarios that are repeated")
    add("--caches", type=Path, help="directory for filled caches, which other runs can use too")
    add("--output", type=Path, help="directory for results (faults-DATE-TIME)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
