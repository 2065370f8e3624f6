r"""Compares the same training step under each way to reduce gradients.

Each method runs in its own processes, one per rank, and takes its turn in each round; its figure is
its time divided by that of the compiled model without DDP in the same round. The table also has an
all-reduce of all gradients alone. Gradients are compared with eager DDP's in the same run. Prints a
table; ``--output DIR`` keeps all measurements and the logs. docs/bench.md explains the figures.

    python tools/bench.py --quick                             # under 3 minutes, to see that it runs
    python tools/bench.py --model gpt2 mlp                    # on the network as it is
    sudo python tools/bench.py --rate 1gbit 2.5gbit --caps 5  # the whole form
    python tools/bench.py --model my_package.models:factory   # a model of yours
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat "concat, traced" --forwards 2           # two forwards before each backward
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat --first 5                               # the first averaged step of a process
    sudo python tools/bench.py --model mlp --rate 2.5gbit --optimizer muon \
        --ways concat "concat, sharded" ZeroRedundancyOptimizer     # with steps of an optimizer
    taskset -c 0 python tools/bench.py --model gpt2 --ranks 1 \
        --ways concat --starts 2                              # CPU seconds of starts, on one rank
    taskset -c 0 python tools/bench.py --model gpt2-broken gpt2-broken-twice --ranks 1 \
        --ways concat --starts 2                              # of models with graph breaks
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from benches.gradients import TOLERANCE
from benches.methods import MEASURING_STEPS, Comparison, Method
from benches.network import (
    DEVICE,
    PREFIX,
    SOCKETS_ALONE,
    UNIT,
    UNSHAPED,
    Network,
    local_network,
    shaped_network,
    words_of,
)
from benches.processes import Place, cores_of
from benches.results import Row, figures_table
from command_line import exit_on_signals, parser_of
from fusion_passes.tuning.tuner import DIRECTORY_VARIABLE
from workloads.models import BROKEN, MAKERS, SIZES
from workloads.ways import AUTO, EAGER, OPTIMIZERS, OURS, PLAIN, WAYS, ZERO

FILE: Final = "bench.json"

DEFAULT_WAYS: Final = ("DDPOptimizer", "torch concat", *OURS, AUTO)
"""Methods that are measured by default, besides no DDP and eager DDP."""

QUICK: Final = {
    "model": ["mlp"],
    "size": "tiny",
    # Whether torch's passes run is no result of a quick run. One of ours is enough: the one that
    # also compares buckets.
    "ways": [AUTO],
    "rounds": 2,
    "round_seconds": 0.1,
}
"""Defaults of the quick form."""

START_S: Final = 900.0
"""Time limit of a first step, in seconds: compilation on a busy core."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 1 if one of our methods failed or is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(given)
    options.output.mkdir(parents=True, exist_ok=True)
    origin = _origin(given)
    cells: list[Comparison] = []
    try:
        _measure(cells, options, lambda: _write(cells, origin, options.output))
    finally:
        _write(cells, origin, options.output)
        plans = [plan for cell in cells for plan in cell.plans()]
        print(figures_table(_rows(cells)), *plans, sep="\n")
        print(f"Written to {options.output}: {FILE}, logs")
    return int(not all(row.is_right for row in _rows(cells)))


def _rows(cells: Sequence[Comparison]) -> list[Row]:
    return [row for cell in cells for row in cell.rows()]


def _origin(arguments: Sequence[str]) -> dict[str, str]:
    """Origin of figures that are measured now."""
    return {
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", "tools/bench.py", *arguments]),
        "versions": f"torch {version('torch')}, Python {platform.python_version()}",
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
    }


def _write(cells: Sequence[Comparison], origin: dict[str, str], output: Path) -> None:
    """Write all measurements to files."""
    rows = [dataclasses.asdict(row) for row in _rows(cells)]
    data: dict[str, Any] = {**origin, "cells": [cell.to_json() for cell in cells], "rows": rows}
    (output / FILE).write_text(json.dumps(data) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    models, others = ", ".join(MAKERS | BROKEN), [way for way in WAYS if way not in (PLAIN, EAGER)]
    ways = f"beside {PLAIN} and {EAGER}: {', '.join(others)} ({', '.join(DEFAULT_WAYS)})"
    caps = "also each way that has one with these caps, in MiB"
    rates = "of the network, such as 2.5gbit; needs root, iproute2 and two ranks"
    optimizer = "steps behind each backward (none): muon is for matrices, and AdamW for the rest"
    first = "processes of a way whose first averaged step beyond compiling is measured (0)"
    starts = "warm starts of a way that are measured, after a cold one (0)"
    output = Path(time.strftime("bench-%Y%m%d-%H%M%S"))
    add(
        "--model",
        nargs="+",
        default=[*MAKERS],
        help=f"of {models}, or module:factory (all of ours without graph breaks)",
    )
    add("--size", choices=SIZES, default="medium", help="of models of ours (medium)")
    choices = [EAGER, *others]
    add("--ways", nargs="+", choices=choices, default=[*DEFAULT_WAYS], metavar="WAY", help=ways)
    add("--ranks", type=int, default=2, help="processes (2)")
    add("--rate", nargs="+", default=[], type=_rate, help=rates)
    add("--caps", nargs="+", type=float, default=[], metavar="MB", help=caps)
    add("--forwards", type=int, default=1, help="of a step, before one backward (1)")
    add("--optimizer", choices=OPTIMIZERS, default="", help=optimizer)
    add("--first", type=int, default=0, metavar="PROCESSES", help=first)
    add("--starts", type=int, default=0, metavar="PROCESSES", help=starts)
    add("--rounds", type=int, default=9, help="of measurement (9)")
    add("--round-seconds", type=float, default=1.0, help="of a way's turn in a round (1)")
    add("--timeout", type=float, default=180.0, help="s, of a way's turn (180)")
    add("--quick", action="store_true", help="a tiny model, few ways, few rounds")
    add("--output", type=Path, default=output, help="directory (bench-DATE-TIME)")
    return parser


def _rate(text: str) -> str:
    if not re.fullmatch(rf"\d+(\.\d+)?{UNIT}", text):
        raise argparse.ArgumentTypeError(f"must be a number of {UNIT}, but is {text!r}")
    return text


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    if options.rate and options.ranks != 2:
        parser.error(f"--rate needs --ranks 2, but they are {options.ranks}")
    if ZERO in options.ways and not options.optimizer:
        parser.error(f"--ways {ZERO} needs an --optimizer")
    gpus = torch.cuda.device_count()
    options.backend = "nccl" if gpus else "gloo"
    if gpus and options.ranks > gpus:
        parser.error(
            f"--ranks must be at most the number of GPUs, {gpus}, but is {options.ranks}. Give "
            "fewer, hide the GPUs (CUDA_VISIBLE_DEVICES=''), or use tools/gpu.py"
        )
    return options


def _measure(
    cells: list[Comparison], options: argparse.Namespace, keep: Callable[[], None]
) -> None:
    """Measure all models: one cell per model. ``keep`` the results after each, in case the next one
    exhausts the machine."""
    with contextlib.ExitStack() as stack:
        network = local_network(options.ranks)
        if options.rate:
            network = stack.enter_context(shaped_network())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))
        for model in options.model:
            cell = Comparison(model, methods_of(options), tuple(options.rate or [UNSHAPED]))
            cells.append(cell)
            try:
                Measuring(cell, options, network, directory).run()
            finally:
                for method in cell.methods:
                    method.kill()
            keep()


def methods_of(options: argparse.Namespace) -> list[Method]:
    """No DDP, eager DDP, and the requested methods: first with their defaults, then with all
    caps."""
    names = list(dict.fromkeys([PLAIN, EAGER, *options.ways]))
    capped = [(name, cap) for name in names if WAYS[name].caps for cap in options.caps]
    defaults = [Method(name, answer_s=options.timeout) for name in names]
    return defaults + [Method(name, cap, answer_s=options.timeout) for name, cap in capped]


class Measuring:
    """Measures one model."""

    def __init__(
        self, cell: Comparison, options: argparse.Namespace, network: Network, directory: Path
    ) -> None:
        self._cell, self._options = cell, options
        self._network, self._directory = network, directory
        self._reference = str(directory / f"{cell.model}-gradients".replace(":", "."))

    def run(self) -> None:
        """Start all methods, and measure them at each rate."""
        cell, options = self._cell, self._options
        self._network.set_rate(UNSHAPED)
        for method in cell.methods:
            if not method.way.compares_buckets:
                self._start(method, UNSHAPED)
        if cell.methods[0].wrong:
            return
        if options.starts:
            self._say("starts")
            place = dataclasses.replace(self._place(UNSHAPED), shares_kernels=False)
            cell.measure_starts(place, START_S, options.starts)
        for rate in cell.rates:
            self._measure_at(rate)
        shutil.rmtree(self._directory / "caches", ignore_errors=True)

    def _measure_at(self, rate: str) -> None:
        """Measure all methods in turns at a rate."""
        cell, options = self._cell, self._options
        self._network.set_rate(rate)
        for method in cell.methods:
            # Its buckets depend on measurements at this rate.
            if method.way.compares_buckets and not method.wrong:
                method.kill()
                method.planned_for = rate
                self._start(method, rate)
        cell.measure(
            rate,
            rounds=options.rounds,
            round_s=options.round_seconds,
            on_round=functools.partial(self._say_round, rate),
        )
        for method in cell.methods:
            if method.way.compares_buckets and (planned := method.ask("planned")):
                method.plans[rate] = planned[0]
        if options.first:
            self._say(f"{words_of(rate)}, first averaged steps")
            cell.measure_firsts(rate, self._place(rate), START_S, options.first)

    def _start(self, method: Method, rate: str) -> None:
        """Start a method, and run the steps in which it compares buckets, if it does."""
        self._say(f"{method.label}, start")
        started = method.start(self._place(rate), START_S)
        if started is None:
            return
        if method.way.compares_buckets:
            self._say(f"{method.label}, steps that compare buckets")
            method.ask("steps", MEASURING_STEPS, timeout_s=START_S)
        self._cell.gradient_bytes = self._cell.gradient_bytes or started[0].gradient_bytes
        method.check(self._reference, TOLERANCE, writes=method is self._cell.methods[1])

    def _place(self, rate: str) -> Place:
        """The place where ranks run, with the buckets that are kept for this rate."""
        options, network = self._options, self._network
        variables = {DIRECTORY_VARIABLE: str(self._directory / "buckets" / rate)}
        if network.interface == DEVICE:
            variables |= SOCKETS_ALONE
            variables |= {f"{name}_SOCKET_IFNAME": DEVICE for name in ("GLOO", "NCCL")}
        return Place(
            model=self._cell.model,
            size=options.size,
            cores=cores_of(options.ranks, sorted(os.sched_getaffinity(0))),
            host=network.host,
            prefixes=network.prefixes,
            variables=variables,
            directory=self._directory,
            logs=options.output / "logs",
            timeout_s=options.timeout,
            backend=options.backend,
            forwards=options.forwards,
            optimizer=options.optimizer,
            shares_kernels=True,
        )

    def _say_round(self, rate: str, number: int) -> None:
        self._say(f"{words_of(rate)}, round {number} of {self._options.rounds}")

    def _say(self, words: str) -> None:
        print(f"{self._cell.model}: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
