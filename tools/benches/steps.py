r"""The same training step under each way of reducing gradients that there is, side by side.

Each way runs in processes of its own, one a rank, and takes its turn in each round; its figure is
its time over that of compute alone (compiled, no DDP) in the same round. Beside the ways stand the
limits: compute alone, the network alone, and the lower bound that follows from when gradients are
ready and what all-reduces cost. Gradients are compared with eager DDP's in the same run.

    python tools/bench.py --quick                             # under 3 minutes, to see that it runs
    python tools/bench.py --model gpt2 mlp                    # on the network as it is
    sudo python tools/bench.py --rate 1gbit 2.5gbit --caps    # the whole form
    python tools/bench.py --model my_package.models:factory   # a model of yours
    sudo python tools/bench.py --model gpt2 --rate 1gbit --no-cold \
        --ways concat "concat, traced" --forwards 2           # two forwards before each backward
    sudo python tools/bench.py --model gpt2 --rate 1gbit --no-cold \
        --ways concat --first 5                               # the first averaged step of a process
    python tools/bench.py --compare steps.json                # what has changed since that run
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from bench_steps import plot, timelines
from bench_steps.comparing import compare
from bench_steps.measuring import Effort, Measuring
from bench_steps.network import (
    PREFIX,
    check_allowed,
    is_alive,
    leftovers,
    parse_rate,
    shaped_network,
)
from bench_steps.pages import as_markdown
from bench_steps.places import place_of
from bench_steps.processes import RowFailed
from bench_steps.progress import Progress
from bench_steps.rows import CAPS_MB
from bench_steps.run import PART, Run
from benches.results import Origin
from command_line import parser_of
from interrupting import INTERRUPTED
from workloads.models import MAKERS, SIZES, subject
from workloads.ways import AUTO, EAGER, PLAIN, WAYS

ROUNDS = 9
ROUND_S = 1.0
TIMEOUT_S = 180.0

RESULTS = f"{PART}.json"

QUICK_WAYS = (EAGER, AUTO)
"""Whether torch's passes run is no result of a quick run. Of ours, the one that also measures what
collectives cost."""


def main(arguments: Sequence[str]) -> int:
    """Run the bench; 1 if a row of ours failed or is wrong, 130 if interrupted."""
    arguments = list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
        return _run(options, arguments)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    models = ", ".join(MAKERS)
    add("--model", nargs="+", metavar="NAME", help=f"of {models}, or module:factory (all of ours)")
    add("--size", choices=SIZES, help="of models of ours (medium)")
    add("--ways", nargs="+", choices=[way for way in WAYS if way != PLAIN], metavar="WAY")
    add("--ranks", type=int, default=2, help="processes of a way (2)")
    add("--rate", nargs="+", default=[], metavar="RATE", help="of the network, such as 1gbit; root")
    add("--caps", nargs="*", type=float, metavar="MB", help="also try each way with these caps")
    add("--rounds", type=int, help=f"of measurement ({ROUNDS})")
    add("--round-seconds", type=float, help=f"of a row's turn in a round ({ROUND_S:g})")
    add("--forwards", type=int, default=1, help="of a step, before one backward (1)")
    first = "processes of a way whose first averaged step beyond compiling is measured (0)"
    add("--first", type=int, default=0, metavar="PROCESSES", help=first)
    add("--together", type=int, help="rows alive at a time (as many as memory holds)")
    add("--timeout", type=float, default=TIMEOUT_S, help=f"s, of a row's turn ({TIMEOUT_S:g})")
    add("--no-cold", action="store_true", help="start each way once, and judge no start")
    add("--quick", action="store_true", help="a tiny model, few ways, few rounds")
    timeline = "also show what each rank of these ways does when"
    add("--timeline", nargs="+", choices=WAYS, default=[], metavar="WAY", help=timeline)
    add("--output", type=Path, metavar="DIR", help="directory for results (bench-DATE-TIME)")
    add("--compare", type=Path, metavar="OLD.json", help="show what has changed since that run")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Complete the options.

    Raises:
        ValueError: one is off; it names the option, the rule, the value and the remedy.
    """
    quick = options.quick
    options.model = options.model or (["mlp"] if quick else list(MAKERS))
    options.size = options.size or ("tiny" if quick else "medium")
    options.ways = options.ways or list(QUICK_WAYS if quick else WAYS)
    options.rounds = (2 if quick else ROUNDS) if options.rounds is None else options.rounds
    if options.round_seconds is None:
        options.round_seconds = 0.1 if quick else ROUND_S
    options.caps = list(CAPS_MB) if options.caps == [] else options.caps or []
    options.rate = [parse_rate(rate) for rate in options.rate]
    for name in options.model:
        subject(name, SIZES[options.size])
    least = {"ranks": 2, "rounds": 1, "together": 1, "forwards": 1, "first": 0}
    for name, value in least.items():
        given = getattr(options, name)
        if given is not None and given < value:
            raise ValueError(f"--{name} must be at least {value}, but is {given}. Give more.")
    for name in ("round_seconds", "timeout"):
        if not getattr(options, name) > 0:
            given, option = getattr(options, name), name.replace("_", "-")
            raise ValueError(f"--{option} must be more than 0 s, but is {given}. Give more.")
    if any(not cap > 0 for cap in options.caps):
        raise ValueError(f"--caps must be more than 0 MB, but are {options.caps}. Give others.")
    if options.rate:
        check_allowed()


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    old = Run.read(options.compare) if options.compare else None
    output = options.output or Path(time.strftime("bench-%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    # make bench and the pages of docs/bench name no part.
    run = Run(Origin.here("", arguments))
    interrupted = False
    try:
        with _terminated_as_interrupted():
            _measure(run, options, output)
    except KeyboardInterrupt:
        interrupted = True
    # Of an interrupted run, what has no round yet.
    run.cells = [cell for cell in run.cells if cell.rows]
    run.write(output / RESULTS)
    text = as_markdown(run)
    (output / f"{PART}.md").write_text(text)
    plot.draw(run, output / f"{PART}.png")
    if run.timelines:
        timelines.draw(run.timelines, output / "timelines.png")
    print(text)
    if old:
        print(compare(old, run))
    print(f"Written to {output}: {RESULTS}, {PART}.md, {PART}.png, logs")
    return INTERRUPTED if interrupted else int(has_failed(run))


def has_failed(run: Run) -> bool:
    """Whether a model could not be measured, or one of our rows failed or is wrong."""
    ours = {name for name, way in WAYS.items() if way.is_ours}
    rows = [row for cell in run.cells for row in cell.rows if row.row.way in ours]
    return bool(run.failures) or not all(row.is_right for row in rows)


def _measure(run: Run, options: argparse.Namespace, output: Path) -> None:
    """Measure all models; add to ``run``."""
    effort = Effort(
        options.rounds,
        options.round_seconds,
        options.together,
        warm=not (options.quick or options.no_cold),
        caps_mb=tuple(options.caps),
        firsts=options.first,
    )
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(shaped_network(options.ranks)) if options.rate else None
        directory = stack.enter_context(_own_directory())
        progress = stack.enter_context(Progress())
        (directory / "logs").mkdir()
        # A process that is killed can leave its logs for who reads the results.
        stack.callback(shutil.copytree, directory / "logs", output / "logs", dirs_exist_ok=True)
        for model in options.model:
            place = place_of(
                model,
                options.size,
                options.ranks,
                network=network,
                directory=directory,
                timeout_s=options.timeout,
                forwards=options.forwards,
                shares_kernels=not effort.warm,  # No start is judged.
            )
            measuring = Measuring(
                place,
                effort,
                set_rate=network.set_rate if network else lambda _: None,
                progress=progress,
            )
            rates = options.rate or [None]
            try:
                measuring.measure(options.ways, rates, run.cells)
            except RowFailed as error:
                run.failures[model] = str(error)
            for way in options.timeline:
                try:
                    run.timelines.extend(measuring.timelines(way, None, rates))
                except RowFailed as error:
                    run.failures[f"timeline of {way}, {model}"] = str(error)
            # What there is so far, if the next model is too much for the machine.
            run.write(output / RESULTS)


@contextlib.contextmanager
def _own_directory() -> Iterator[Path]:
    """For caches and logs; after those of benches that were killed, which are large."""
    root = Path(tempfile.gettempdir())
    for name in leftovers("\n".join(path.name for path in root.glob(f"{PREFIX}-*")), is_alive):
        shutil.rmtree(root / name, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-{os.getpid()}-") as directory:
        yield Path(directory)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A run that is terminated, or whose terminal is gone, ends its processes and removes its
    network too, as one that is interrupted."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
