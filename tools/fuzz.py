"""Trains random models in random loops under the flag and beside eager DDP, and compares.

A case follows from its seed alone. Each runs on processes that stay from case to case; what
differs, crashes or hangs is run again on new ones, and written to the output directory with a
script that shows it, made as small as it gets.

    python tools/fuzz.py --seeds 0:100
    python tools/fuzz.py --seeds 0:1000 --slice 3/10 --seconds 1800 --output fuzz
    python tools/fuzz.py --case 17                  # one case, in full
    python tools/fuzz.py --minimise 17 --output fuzz
    python tools/fuzz.py --replay fuzz/17.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from command_line import parser_of  # noqa: E402
from fuzzing.case import Case, from_json, to_json  # noqa: E402
from fuzzing.drawing import draw  # noqa: E402
from fuzzing.environment import prepare  # noqa: E402
from fuzzing.reproducer import write_script  # noqa: E402
from fuzzing.running import Outcome, Runner  # noqa: E402
from fuzzing.shrinking import shrink  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; 1 if there is a finding."""
    parser = _parser()
    options = parser.parse_args(arguments)
    prepare(options.cache)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with Runner(timeout_s=options.timeout) as runner:
            return _run(runner, options)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--seeds", type=_seeds, default=range(100), metavar="FIRST:END", help="(0:100)")
    add("--slice", type=_slice, default=(1, 1), metavar="N/M", help="the Nth of M parts of them")
    add("--seconds", type=float, default=float("inf"), help="start no case after so many")
    add("--case", type=int, metavar="SEED", help="one case, with all that is known of it")
    add("--replay", type=Path, metavar="FILE", help="the same for a case in a file")
    add("--minimise", type=int, metavar="SEED", help="make a case that fails small")
    add("--shrink-seconds", type=float, default=900.0, help="at most, for each finding (900)")
    add("--mode", choices=("concat", "coalesced"), help="instead of the modes that are drawn")
    add("--only", default="", metavar="REGEX", help="only cases whose JSON has it")
    add("--without", default="", metavar="REGEX", help="leave out cases whose JSON has it")
    add("--timeout", type=float, default=200.0, help="s for a training (200)")
    add("--output", type=Path, default=Path("fuzz"), help="directory for findings (fuzz)")
    add("--cache", type=Path, help="directory of compiled kernels, kept from run to run")
    return parser


def _seeds(text: str) -> range:
    first, _, end = text.rpartition(":")
    return range(int(first or 0), int(end))


def _slice(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise argparse.ArgumentTypeError(f"must be N/M with N from 1 to M, but is {text}")
    return int(number), int(parts)


def _run(runner: Runner, options: argparse.Namespace) -> int:
    if options.replay is not None:
        return _show(runner, from_json(options.replay.read_text()))
    if options.case is not None:
        return _show(runner, _draw(options.case, options))
    if options.minimise is not None:
        case = _draw(options.minimise, options)
        outcome = runner.run(case)
        if outcome.bad:
            _keep(runner, case, outcome, options)
        return _say(case, outcome)
    return _run_all(runner, options)


def _draw(seed: int, options: argparse.Namespace) -> Case:
    case = draw(seed)
    if options.mode is None:
        return case
    flag = {**case.flag, "mode": options.mode} if isinstance(case.flag, dict) else options.mode
    if isinstance(flag, dict) and flag.get("scaling") == "bucket":
        flag["scaling"] = "collective"
    return replace(case, flag=flag)


def _chosen(options: argparse.Namespace) -> Iterator[int]:
    number, parts = options.slice
    size = -(-len(options.seeds) // parts)
    yield from options.seeds[(number - 1) * size : number * size]


def _run_all(runner: Runner, options: argparse.Namespace) -> int:
    start, counts = time.monotonic(), Counter[str]()
    past: list[int] = []
    findings = 0
    for seed in _chosen(options):
        if time.monotonic() - start > options.seconds:
            break
        case = _draw(seed, options)
        text = to_json(case)
        if options.without and re.search(options.without, text):
            continue
        if not re.search(options.only, text):
            continue
        past = [*past, seed] if runner.cases else [seed]
        outcome = runner.run(case)
        _say(case, outcome)
        if outcome.bad:
            # What a case before left behind could be the cause.
            runner.renew()
            again = runner.run(case)
            findings += 1
            if again.bad:
                _keep(runner, case, again, options)
            else:
                text = f"{outcome.kind} after {past}, alone {again.kind}\n{outcome.words}"
                (options.output / f"{seed}.only-after.txt").write_text(text)
                print(text, flush=True)
        counts[outcome.kind] += 1
        _log(options.output, case, outcome)
    minutes = (time.monotonic() - start) / 60
    print(f"{counts.total()} cases in {minutes:.0f} min: {dict(counts)}")
    return int(findings > 0)


def _log(output: Path, case: Case, outcome: Outcome) -> None:
    line = {"seed": case.seed, "kind": outcome.kind, "seconds": outcome.seconds}
    line |= {"words": outcome.words[:2000], "averaged": outcome.averaged, "cpu": outcome.cpu}
    with (output / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _show(runner: Runner, case: Case) -> int:
    print(to_json(case, indent=2), flush=True)
    outcome = runner.run(case)
    _say(case, outcome)
    print(outcome.words)
    return int(outcome.bad)


def _say(case: Case, outcome: Outcome) -> int:
    words = outcome.words.strip().partition("\n")[0][:160]
    averaged = " ".join(f"{count}x{copied}" for count, copied in outcome.averaged)
    print(f"{case.seed}: {outcome.kind} ({outcome.seconds:.0f} s) [{averaged}] {words}", flush=True)
    return int(outcome.bad)


def _keep(runner: Runner, case: Case, outcome: Outcome, options: argparse.Namespace) -> None:
    """Write a finding as it was drawn, then as small as it gets."""
    path = options.output / f"{case.seed}.json"
    path.write_text(to_json(case, indent=2))
    path.with_suffix(".txt").write_text(f"{outcome.kind}\n{outcome.words}\n")
    small, seen = shrink(runner, case, outcome, seconds=options.shrink_seconds)
    path.with_suffix(".small.json").write_text(to_json(small, indent=2))
    path.with_suffix(".small.txt").write_text(f"{seen.kind}\n{seen.words}\n")
    script = path.with_suffix(".small.py")
    write_script(small, script)
    print(f"{case.seed}: {seen.kind}: {script}\n{seen.words[:1500]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
