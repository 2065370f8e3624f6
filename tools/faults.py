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
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from command_line import exit_on_signals, parser_of
from fault_runs.judging import exit_words, violations
from fault_runs.records import RankRecord, RunRecord
from fault_runs.runs import Runner
from fault_runs.scenarios import MODES, PEERS, QUICK, SCENARIOS, Scenario, Way

QUICK_REPEATS = 3


def main(arguments: Sequence[str] | None = None, scenarios: Sequence[Scenario] = SCENARIOS) -> int:
    """Run scenarios; 1 if one broke a rule."""
    parser = _parser()
    options = parser.parse_args(arguments)
    patterns = options.select or ["*"]
    chosen = [
        scenario
        for scenario in scenarios
        if any(fnmatchcase(scenario.name, pattern) for pattern in patterns)
        if scenario.name in QUICK or not options.quick
    ]
    if not chosen:
        parser.error(f"no scenario has a name like {' or '.join(patterns)}; see --list")
    if options.list:
        print("\n".join(scenario.name for scenario in chosen))
        return 0
    repeats = options.repeats or (QUICK_REPEATS if options.quick else None)
    if repeats:
        chosen = [dataclasses.replace(s, repeats=repeats if s.repeats > 1 else 1) for s in chosen]
    output = options.output or Path(time.strftime("faults-%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    broken = list[str]()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        runner = Runner(Path(directory))
        for number, scenario in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {scenario.name}", flush=True)
            for way, runs, found in _run(runner, scenario, options):
                _keep(output, scenario, way, runs, found)
                broken += [f"{scenario.name}, {way}: {text}" for text in found]
    print("\n".join(broken or ["No rule was broken."]))
    return int(bool(broken))


def _run(
    runner: Runner, scenario: Scenario, options: argparse.Namespace
) -> Iterator[tuple[Way, list[RunRecord], list[str]]]:
    """What became of a scenario with each peer, then in each mode; and in what a mode is wrong."""
    peers: list[RunRecord] = []
    for way in [options.peer] if options.peer else PEERS:
        if way in scenario.peers:
            runs = runner.runs(scenario, way)
            peers += runs
            yield way, runs, []
    for way in [options.mode] if options.mode else MODES:
        runs = runner.runs(scenario, way)
        found = [text for run in runs for text in violations(scenario, run, peers)]
        yield way, runs, list(dict.fromkeys(found))


def _keep(
    output: Path, scenario: Scenario, way: Way, runs: list[RunRecord], found: list[str]
) -> None:
    """Write all that is known of runs, and print what became of each rank."""
    recorded = [dataclasses.asdict(run) for run in runs]
    line = {"scenario": scenario.name, "way": way, "violations": found, "runs": recorded}
    with (output / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    ranks = Counter(_words(rank) for run in runs for rank in run.ranks)
    for words, count in ranks.items():
        print(f"  {way}, {words}{f' ({count} times)' if count > 1 else ''}", flush=True)
    for text in found:
        print(f"  VIOLATION, {way}: {text}", flush=True)


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


def _words(rank: RankRecord) -> str:
    """What became of a rank."""
    if rank.is_right:
        growth = rank.value_of("growth", None)
        return f"rank {rank.rank}: right" + (f", {growth}" if growth else "")
    end = f"{exit_words(rank.exit_code)} at {rank.end_s:.1f} s, {rank.steps} steps"
    errors = [f"{f.brief()} at {f.after_s:.1f} s" for f in rank.failures[:2]]
    return f"rank {rank.rank}: " + "; ".join([end, *errors])


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
