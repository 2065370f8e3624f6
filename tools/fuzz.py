"""Trains random models in random loops, with eager DDP and under the flag, and compares.

A case depends only on its seed and on ``--shard-optimizer``. Ranks are kept from case to case. A
case that differs, crashes or hangs is run again on new ranks, shrunk, and written to the output
directory.

    python tools/fuzz.py --seeds 0:100
    python tools/fuzz.py --seeds 200:300 --seconds 1800 --output fuzz
    python tools/fuzz.py --case 17                    # run one case, and print all details
    python tools/fuzz.py --seeds 17:18                # run the same case, and shrink it if it fails
    python tools/fuzz.py --seeds 0:100 --shard-optimizer
    python tools/fuzz.py --replay fuzz/17.small.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from command_line import parser_of
from fuzzing.case import Case, from_json, to_json
from fuzzing.drawing import draw
from fuzzing.running import Outcome, Runner


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases. Return 1 if one of them differs, crashes or hangs, otherwise 0."""
    options = _parser().parse_args(arguments)
    _prepare()
    options.output.mkdir(parents=True, exist_ok=True)
    with Runner(timeout_s=options.timeout) as runner:
        if options.replay is not None:
            return _show(runner, from_json(options.replay.read_text()))
        if options.case is not None:
            return _show(runner, draw(options.case, shard_optimizer=options.shard_optimizer))
        return _run_all(runner, options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    seeds = "seeds of the cases, without END (default: 0:100)"
    add("--seeds", type=_seeds, default=range(100), metavar="FIRST:END", help=seeds)
    limit = "seconds after which no further case is started (default: no limit)"
    add("--seconds", type=float, default=float("inf"), help=limit)
    add("--case", type=int, metavar="SEED", help="run one case, and print all details")
    sharding = 'draw the cases with shard_optimizer=True or "overlap"'
    add("--shard-optimizer", action="store_true", help=sharding)
    add("--replay", type=Path, metavar="FILE", help="run the case in a file, and print all details")
    shrinking = "time limit for shrinking a case, in seconds (default: 900)"
    add("--shrink-seconds", type=float, default=900.0, help=shrinking)
    training = "time limit of a training, in seconds (default: 200)"
    add("--timeout", type=float, default=200.0, help=training)
    add("--output", type=Path, default=Path("fuzz"), help="output directory (default: fuzz)")
    return parser


def _seeds(text: str) -> range:
    first, _, end = text.rpartition(":")
    return range(int(first or 0), int(end))


def _prepare() -> None:
    """Set the environment of the ranks. All runs of a user share a directory of compiled kernels. A
    rank compiles in its own process, because compile workers would compete with the ranks for the
    cores."""
    cache = f"{tempfile.gettempdir()}/fusion-passes-fuzz-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("FUSION_PASSES_DDP_FUSION", None)


def _run_all(runner: Runner, options: argparse.Namespace) -> int:
    start, counts, findings = time.monotonic(), Counter[str](), 0
    past: list[int] = []
    for seed in options.seeds:
        if time.monotonic() - start > options.seconds:
            break
        case = draw(seed, shard_optimizer=options.shard_optimizer)
        past = [*past, seed] if runner.cases else [seed]
        outcome = runner.run(case)
        _say(case, outcome)
        if outcome.bad:
            findings += 1
            _run_again(runner, case, outcome, past, options)
        counts[outcome.kind] += 1
        line = {"seed": seed, "kind": outcome.kind, "seconds": outcome.seconds}
        with (options.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line | {"words": outcome.words[:2000]}) + "\n")
    minutes = (time.monotonic() - start) / 60
    print(f"{counts.total()} cases in {minutes:.0f} min: {dict(counts)}")
    return int(findings > 0)


def _run_again(
    runner: Runner, case: Case, outcome: Outcome, past: list[int], options: argparse.Namespace
) -> None:
    """Run a bad case again on new ranks, because an earlier case could be the cause. Write the case
    as it was drawn, and the shrunk one."""
    runner.renew()
    again = runner.run(case)
    path = options.output / f"{case.seed}.json"
    if not again.bad:
        text = f"{outcome.kind} after {past}, alone {again.kind}\n{outcome.words}"
        path.with_suffix(".only-after.txt").write_text(text)
        print(text, flush=True)
        return
    _write(path, case, again)
    small, seen = runner.shrink(case, again, seconds=options.shrink_seconds)
    path = path.with_suffix(".small.json")
    _write(path, small, seen)
    print(f"{case.seed}: {seen.kind}: {path}\n{small}\n{seen.words[:1500]}", flush=True)


def _write(path: Path, case: Case, outcome: Outcome) -> None:
    path.write_text(to_json(case, indent=2))
    path.with_suffix(".txt").write_text(f"{outcome.kind}\n{outcome.words}\n")


def _show(runner: Runner, case: Case) -> int:
    print(to_json(case, indent=2), flush=True)
    outcome = runner.run(case)
    _say(case, outcome)
    print(outcome.words)
    return int(outcome.bad)


def _say(case: Case, outcome: Outcome) -> None:
    words = outcome.words.strip().partition("\n")[0][:160]
    averaged = " ".join(f"{count}x{copied}" for count, copied in outcome.averaged)
    print(f"{case.seed}: {outcome.kind} ({outcome.seconds:.0f} s) [{averaged}] {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
