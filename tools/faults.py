"""Injects faults into small trainings over Gloo, with the flag and without, and shows where the
flag makes it worse: a hang, an error that comes later or hides another, something left behind.

Each scenario runs with eager DDP and with stock torch.compile(ddp), then under each mode of the
flag. What became of each rank is printed, and written with all that was recorded; the exit status
is 1 if a rule was broken.

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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_line import exit_on_signals, parser_of
from fault_runs.judging import exit_words
from fault_runs.records import RankRecord
from fault_runs.runs import Runner, Verdict
from fault_runs.scenarios import MODES, PEERS, SCENARIOS, Scenario, select

QUICK_REPEATS = 3


def main(arguments: Sequence[str] | None = None, scenarios: Sequence[Scenario] = SCENARIOS) -> int:
    """Run scenarios; 1 if one broke a rule."""
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
    output = options.output or Path(time.strftime("faults-%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    broken = list(_run(chosen, options, output))
    print("\n".join(broken or ["No rule was broken."]))
    return int(bool(broken))


def _run(chosen: Sequence[Scenario], options: argparse.Namespace, output: Path) -> Iterator[str]:
    """Run scenarios; what is broken, in words."""
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        runner = Runner(Path(directory), output, [options.peer] if options.peer else PEERS)
        for number, scenario in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {scenario.name}", flush=True)
            for verdict in runner.verdicts(scenario, [options.mode] if options.mode else MODES):
                print(*lines_of(verdict), sep="\n", flush=True)
                yield from (f"{scenario.name}, {verdict.way}: {t}" for t in verdict.violations)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--select", action="append", default=[], metavar="GLOB", help="scenarios by name")
    add("--mode", choices=MODES, help="one mode of the flag (both)")
    add("--peer", choices=PEERS, help="one peer (both): quicker, and stricter")
    add("--quick", action="store_true", help="a few scenarios")
    add("--list", action="store_true", help="print the names of the scenarios, run nothing")
    add("--repeats", type=int, help="of scenarios that are repeated")
    add("--output", type=Path, help="directory for results (faults-DATE-TIME)")
    return parser


def lines_of(verdict: Verdict) -> Iterator[str]:
    """A line for each rank, and one for each violation."""
    if len(verdict.runs) > 1:
        ranks = [rank for run in verdict.runs for rank in run.ranks]
        codes = Counter(exit_words(rank.exit_code) for rank in ranks)
        counts = ", ".join(f"{count} with {words}" for words, count in codes.items())
        yield f"  {verdict.way}: {len(verdict.runs)} runs: {counts}"
    else:
        for rank in verdict.runs[-1].ranks:
            yield f"  {verdict.way}, rank {rank.rank}: {_words(rank)}"
            for failure in rank.failures[:2]:
                yield f"      {failure.brief()}"
    for text in verdict.violations:
        yield f"  VIOLATION, {verdict.way}: {text}"


def _words(rank: RankRecord) -> str:
    if rank.exit_code is None:
        return "hung"
    if rank.is_right:
        growth = rank.value_of("growth", None)
        return f"right, {rank.end_s:.1f} s" + (f", {growth}" if growth else "")
    end = f"{exit_words(rank.exit_code)} at {rank.end_s:.1f} s"
    if not rank.failures:
        return end
    done = f", {rank.steps} steps" if rank.exit_code == 0 else ""
    return f"{rank.failures[0].kinds[0]} at {rank.failures[0].after_s:.1f} s, {end}{done}"


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
