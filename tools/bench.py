r"""Measures a training step with each method of reducing gradients.

Each method runs in its own processes, one per rank, and takes its turn in each round. Its figure is
its step time divided by that of the compiled model without DDP in the same round. The table also
contains an all-reduce of all gradients without a training step. The gradients of each method are
compared with those of eager DDP in the same run. The bench prints the table, and writes all
measurements and the logs to ``--output``. docs/bench.md explains the figures.

    python tools/bench.py --quick                             # a test run of less than 3 minutes
    python tools/bench.py --model gpt2 mlp                    # two models, network without a limit
    sudo python tools/bench.py --rate 1gbit 2.5gbit --caps 5  # all models, two rates
    python tools/bench.py --model my_package.models:factory   # your own model
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat "concat, traced" --forwards 2           # two forwards before each backward
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat --first 5                               # the first averaged step of a process
    sudo python tools/bench.py --model mlp --rate 2.5gbit --optimizer muon \
        --ways concat "concat, sharded" ZeroRedundancyOptimizer     # with steps of an optimizer
    taskset -c 0 python tools/bench.py --model gpt2 --ranks 1 \
        --ways concat --starts 2                              # CPU seconds of cold and warm starts
    taskset -c 0 python tools/bench.py --model gpt2-broken gpt2-broken-twice --ranks 1 \
        --ways concat --starts 2                              # the same with graph breaks
    taskset -c 0 python tools/bench.py --model many-parameters --ranks 1 \
        --ways "DDP, one graph" concat                        # CPU time for 200 parameters
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
from workloads.models import MAKERS, SIZES, SPECIAL
from workloads.ways import AUTO, EAGER, OPTIMIZERS, OURS, PLAIN, WAYS, ZERO

FILE: Final = "bench.json"

DEFAULT_WAYS: Final = ("DDPOptimizer", "torch concat", *OURS, AUTO)
"""Methods that are measured by default, besides no DDP and eager DDP."""

QUICK: Final = {
    "model": ["mlp"],
    "size": "tiny",
    # A quick run only tests the bench: the method that also compares buckets is enough.
    "ways": [AUTO],
    "rounds": 2,
    "round_seconds": 0.1,
}
"""Defaults of the quick form."""

START_S: Final = 900.0
"""Time limit of a first step, in seconds: compilation on a busy core."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench. Return 1 if a method of this package failed or is wrong, otherwise 0."""
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
    """The date, command, versions and machine of this run."""
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
    models, others = ", ".join(MAKERS | SPECIAL), [way for way in WAYS if way not in (PLAIN, EAGER)]
    ways = (
        f"methods to measure besides {PLAIN} and {EAGER}, from {', '.join(others)} "
        f"(default: {', '.join(DEFAULT_WAYS)})"
    )
    caps = "bucket caps in MiB; methods with a cap are measured with each, and with their default"
    rates = (
        "rates of the network, such as 2.5gbit (default: no limit); needs root, iproute2, two ranks"
    )
    first = (
        "processes per method that measure the first averaged step, without compiling (default: 0)"
    )
    starts = "warm starts to measure per method, after a cold one (default: 0)"
    optimizer = (
        "optimizer that steps after each backward (default: none); muon steps matrices, and AdamW "
        "steps the rest"
    )
    output = Path(time.strftime("bench-%Y%m%d-%H%M%S"))
    add(
        "--model",
        nargs="+",
        default=[*MAKERS],
        help=f"models, from {models}, or module:factory (default: the first six)",
    )
    add("--size", choices=SIZES, default="medium", help="size of these models (default: medium)")
    choices = [EAGER, *others]
    add("--ways", nargs="+", choices=choices, default=[*DEFAULT_WAYS], metavar="WAY", help=ways)
    add("--ranks", type=int, default=2, help="number of processes (default: 2)")
    add("--rate", nargs="+", default=[], type=_rate, help=rates)
    add("--caps", nargs="+", type=float, default=[], metavar="MB", help=caps)
    forwards = "number of forwards before the backward of a step (default: 1)"
    add("--forwards", type=int, default=1, help=forwards)
    add("--optimizer", choices=OPTIMIZERS, default="", help=optimizer)
    add("--first", type=int, default=0, metavar="PROCESSES", help=first)
    add("--starts", type=int, default=0, metavar="PROCESSES", help=starts)
    add("--rounds", type=int, default=9, help="number of rounds (default: 9)")
    turn = "seconds of a method's turn in a round (default: 1)"
    add("--round-seconds", type=float, default=1.0, help=turn)
    limit = "time limit of a method's turn, in seconds (default: 180)"
    add("--timeout", type=float, default=180.0, help=limit)
    add("--quick", action="store_true", help="measure a tiny model with few methods and rounds")
    add("--output", type=Path, default=output, help="output directory (default: bench-DATE-TIME)")
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
    """Measure all models, one cell per model. ``keep`` is called after each, so that results are
    kept if the next model exhausts the machine."""
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
    """No DDP, eager DDP, and the requested methods: all with their defaults, then those that have a
    cap with each requested cap."""
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
        """Measure all methods at a rate."""
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
        """Start a method. Run the steps in which ``"auto"`` compares buckets."""
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
        """The place of the ranks, with the buckets that ``"auto"`` has kept for this rate."""
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
