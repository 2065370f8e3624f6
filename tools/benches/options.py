"""Measures a training step with options of DDP, beside DDP's own reducer with the same option.

Two ranks over Gloo train the same model, compiled, with ``ddp_fusion`` ``"concat"`` and
``"coalesced"``, and without the flag. Each has processes of its own, which wait while others train.
In each round all make a block of steps (forward and backward); a figure is its block's median step,
on the slower rank, over that of DDP's own reducer in the same round. The gradients of the last step
are compared with those of DDP's own reducer.

    python tools/bench.py options                                 # all options, of gpt2
    python tools/bench.py options --option static_graph join      # some
    python tools/bench.py options --model mlp --size tiny --rounds 2 --steps 4

The exit status is 1 if a row failed or has other gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tqdm import tqdm

from bench_steps.processes import Place, RowFailed, RowProcesses, cores_of
from bench_steps.rows import Checked, Row
from benches.results import Origin, page, parser_of, table, write
from workloads.models import MAKERS, SIZES
from workloads.options import OPTIONS

PEER: Final = "DDPOptimizer"
"""The method that figures are over: DDP's own reducer, beside a compiled forward."""
OURS: Final = ("concat", "coalesced")

RANKS: Final = 2
WARM_UP_STEPS: Final = 6
"""Until DDP has made new buckets, PowerSGD compresses, and both branches are compiled; even."""
TIMEOUT_S: Final = 300.0
"""Of anything that ranks are asked; a cold start of the largest takes some 150 s on two cores."""

WORKER: Final = "bench_steps.option_rank"

MEANING: Final = (
    f"{RANKS} ranks over Gloo. Seconds of a step (forward and backward, compiled) over those of "
    "DDP's own reducer with the same option, in the same round: median and quartiles over rounds. "
    "*Gradients*: of the last step, beside those of DDP's own reducer, whose forward is compiled "
    "with torch's default, DDPOptimizer."
)


@dataclass
class Found:
    """What was measured of an option.

    Attributes:
        ratios: by method, one for each round.
        wrong: by method, why gradients differ, or why there is no figure; empty if all is well.
        warned: by method, what the package has warned of.
        errors: by method, the largest difference of a gradient, over its largest element.
    """

    ratios: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    warned: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    options = _options(arguments)
    origin = Origin.here("options", arguments)
    cells: dict[str, dict[str, Found]] = {}
    for model in options.model:
        rows = cells[model] = {}
        # Of all options: each method finds the kernels that it has compiled for another one.
        with tempfile.TemporaryDirectory(prefix="bench-options-") as directory:
            place = _place(model, options.size, Path(directory))
            for name in tqdm(options.option, desc=model):
                rows[name] = measure(name, place, options.rounds, options.steps)
                # What there is so far, if the bench is ended.
                if options.output is not None:
                    write(
                        options.output,
                        "options",
                        origin,
                        {"cells": cells},
                        as_markdown(cells, origin),
                    )
    print(as_markdown(cells, origin))
    return int(any(found.wrong for rows in cells.values() for found in rows.values()))


def as_markdown(cells: dict[str, dict[str, Found]], origin: Origin) -> str:
    """The table, with what is needed to read and to repeat it."""
    rows = [
        [model, name, _verdict(found), *(_cell(found, way) for way in OURS)]
        for model, by_option in cells.items()
        for name, found in by_option.items()
    ]
    shown = table(["model", "option", "gradients", *OURS], rows, words=3)
    return page("Options of DDP", origin, MEANING, shown, *_notes(cells))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt2"], metavar="NAME", choices=[*MAKERS])
    parser.add_argument("--size", default="small", choices=[*SIZES])
    parser.add_argument("--rounds", type=int, default=9, help="blocks of steps of a method (9)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block, even (10)")
    parser.add_argument(
        "--option", nargs="+", default=[*OPTIONS], metavar="NAME", choices=[*OPTIONS]
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, but is {options.rounds}: of one is no spread")
    if options.steps < 4 or options.steps % 2:
        parser.error(
            f"--steps must be an even number from 4 on, but is {options.steps}: the ranks take "
            "two branches in turn, and join leaves two steps out"
        )
    return options


def measure(name: str, place: Place, rounds: int, steps: int) -> Found:
    """Measure an option; nothing that fails in it ends the bench.

    Args:
        name: of :data:`workloads.options.OPTIONS`.
        place: where ranks run.
        rounds: blocks of each method.
        steps: of a block.
    """
    found = Found()
    processes: dict[str, RowProcesses] = {}
    try:
        _start(name, place, found, processes)
        _take_turns(found, processes, rounds, steps)
        _compare(found, processes, place.directory / "gradients", OPTIONS[name].tolerance)
    finally:
        for ranks in processes.values():
            ranks.end()
    if PEER in found.wrong:
        found.wrong |= {way: found.wrong.get(way, "nothing to compare with") for way in OURS}
    return found


def _place(model: str, size: str, directory: Path) -> Place:
    cores = cores_of(RANKS, sorted(os.sched_getaffinity(0)))
    prefixes = ((),) * RANKS
    return Place(model, size, cores, "127.0.0.1", prefixes, {}, directory, TIMEOUT_S, worker=WORKER)


def _start(name: str, place: Place, found: Found, processes: dict[str, RowProcesses]) -> None:
    for way in (PEER, *OURS):
        try:
            processes[way] = RowProcesses(Row("way", way), place)
            said = [text for texts in processes[way].ask("start_option", name) for text in texts]
            processes[way].ask("steps", WARM_UP_STEPS)
        except RowFailed as error:
            found.wrong[way] = str(error)
        else:
            found.warned[way] = list(dict.fromkeys(said))


def _take_turns(found: Found, processes: dict[str, RowProcesses], rounds: int, steps: int) -> None:
    """Have each method make a block of steps in each round, in turn forwards and backwards."""
    for number in range(rounds):
        running = [way for way in processes if way not in found.wrong]
        seconds = {}
        for way in running if number % 2 else reversed(running):
            try:
                ranks = [stepped.seconds for stepped in processes[way].ask("steps", steps)]
            except RowFailed as error:
                found.wrong[way] = str(error)
            else:
                seconds[way] = slower_step(ranks)
        for way in seconds.keys() & set(OURS) if PEER in seconds else ():
            found.ratios.setdefault(way, []).append(seconds[way] / seconds[PEER])


def slower_step(ranks: Iterable[Sequence[float]]) -> float:
    """Seconds of the step in the middle; of each step those of the slowest rank."""
    slowest = [max(step) for step in zip(*ranks, strict=True)]
    middle: float = statistics.median(slowest)
    return middle


def _compare(
    found: Found, processes: dict[str, RowProcesses], reference: Path, tolerance: float
) -> None:
    for way, ranks in processes.items():
        if way in found.wrong or PEER in found.wrong:
            continue
        try:
            checks: list[Checked] = ranks.ask("check", str(reference), way == PEER)
        except RowFailed as error:
            found.wrong[way] = str(error)
            continue
        found.errors[way] = max(check.error for check in checks)
        differs = [why for check in checks if (why := difference(check, tolerance))]
        if differs:
            found.wrong[way] = differs[0]


def difference(check: Checked, tolerance: float) -> str:
    """Why the gradients of a rank are not those of DDP's own reducer; empty if they are."""
    if check.missing:
        return f"gradients of one side only: {', '.join(check.missing)}"
    if not check.error <= tolerance:
        return f"{check.worst} is off by {check.error:.1%}"
    return ""


def _verdict(found: Found) -> str:
    return f"**wrong**: {', '.join(found.wrong)}" if found.wrong else "equal"


def _cell(found: Found, way: str) -> str:
    values = found.ratios.get(way, [])
    if len(values) < 2:
        return ""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _notes(cells: dict[str, dict[str, Found]]) -> list[str]:
    """What went wrong, and what the package has warned of."""
    return [
        f"{model}, {name}, {way}: {text}"
        for model, by_option in cells.items()
        for name, found in by_option.items()
        for way in (PEER, *OURS)
        for text in [found.wrong.get(way, ""), *found.warned.get(way, [])]
        if text
    ]
