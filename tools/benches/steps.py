r"""The same training step under each way of reducing gradients that there is, side by side.

Each method runs in processes of its own, one a rank, and takes its turn in each round; its figure
is its time over that of the model without DDP, compiled, in the same round. Beside the methods
stands an all-reduce of all gradients alone. Gradients are compared with eager DDP's in the same
run.

    python tools/bench.py --quick                             # under 3 minutes, to see that it runs
    python tools/bench.py --model gpt2 mlp                    # on the network as it is
    sudo python tools/bench.py --rate 1gbit 2.5gbit --caps 5  # the whole form
    python tools/bench.py --model my_package.models:factory   # a model of yours
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat "concat, traced" --forwards 2           # two forwards before each backward
    sudo python tools/bench.py --model gpt2 --rate 1gbit \
        --ways concat --first 5                               # the first averaged step of a process
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from benches.gradients import TOLERANCE
from benches.methods import Comparison, Method
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
from benches.results import Origin, Row, figures_table, overview, page, parser_of, write
from fusion_passes.profile.files import DIRECTORY_VARIABLE
from fusion_passes.profile.ready_clock import MEASURED_ROUNDS, SKIPPED_ROUNDS
from workloads.models import MAKERS, SIZES, subject
from workloads.ways import AUTO, EAGER, OURS, PLAIN, WAYS

PART: Final = "steps"

DEFAULT_WAYS: Final = ("DDPOptimizer", "torch concat", *OURS, AUTO)
"""Beside no DDP and eager DDP."""

QUICK_WAYS: Final = (AUTO,)
"""Whether torch's passes run is no result of a quick run. Of ours, the one that also measures what
collectives cost."""

ROUNDS: Final = 9
ROUND_S: Final = 1.0
TIMEOUT_S: Final = 180.0
START_S: Final = 900.0
"""At most, for a first step: compilation on a busy core."""

MEASURING_STEPS: Final = SKIPPED_ROUNDS + MEASURED_ROUNDS
"""Of a method that plans its buckets from what an earlier run has measured: it has by then."""

LEGEND: Final = """\
*ms*: a step, forward and backward, without an optimizer: the median over rounds. *Time over no
DDP*: over that of the model alone, compiled, in the same round; median and quartiles over rounds.
*Exposed ms*: what a step takes beyond no DDP. *Over torch's fastest*: of its methods at their
defaults, in pairs of the same round. *CPU*: CPU seconds of all ranks over those of no DDP and the
all-reduce alone. *Peak*: memory of a step, beyond parameters. *First step*: the first one of a
process whose gradients are averaged, beyond compiling. Gradients are compared with eager DDP's."""


@dataclass
class Run:
    """What was measured.

    Attributes:
        origin: where its figures are from.
        cells: of each model.
        failures: by model, why it could not be measured at all.
    """

    origin: Origin
    cells: list[Comparison] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Of all models."""
        return [row for cell in self.cells for row in cell.rows()]

    @property
    def has_failed(self) -> bool:
        """Whether a model could not be measured, or a method of ours failed or is wrong."""
        return bool(self.failures) or not all(row.is_right for row in self.rows())

    def as_markdown(self) -> str:
        """The tables, with what is needed to read and to repeat them."""
        failed = [f"Not measured: {name}: {reason}" for name, reason in self.failures.items()]
        rows = self.rows()
        shown = [figures_table(rows)] if rows else []
        title = "Training steps under each way to reduce gradients"
        plans = [plan for cell in self.cells for plan in cell.plans()]
        return page(title, self.origin, overview(rows), *shown, LEGEND, *plans, *failed)

    def write(self, output: Path) -> None:
        """Keep it in a directory."""
        figures = {
            "cells": [cell.to_json() for cell in self.cells],
            "rows": self.rows(),
            "failures": self.failures,
        }
        write(output, PART, self.origin, figures, self.as_markdown())


def main(arguments: Sequence[str]) -> int:
    """Run the bench; 1 if a method of ours failed or is wrong."""
    arguments = list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    output = options.output or Path(time.strftime("bench-%Y%m%d-%H%M%S"))
    # make bench and the pages of docs name no part.
    run = Run(Origin.here("", arguments))
    try:
        _measure(run, options, output)
    finally:
        run.write(output)
        print(run.as_markdown())
        print(f"Written to {output}: {PART}.json, {PART}.md, logs")
    return int(run.has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    models, others = ", ".join(MAKERS), [way for way in WAYS if way not in (PLAIN, EAGER)]
    add("--model", nargs="+", metavar="NAME", help=f"of {models}, or module:factory (all of ours)")
    add("--size", choices=SIZES, help="of models of ours (medium)")
    ways = f"beside {PLAIN} and {EAGER}: {', '.join(others)} ({', '.join(DEFAULT_WAYS)})"
    add("--ways", nargs="+", choices=[EAGER, *others], metavar="WAY", help=ways)
    add("--ranks", type=int, default=2, help="processes (2)")
    rates = "of the network, such as 2.5gbit; needs root, iproute2 and two ranks"
    add("--rate", nargs="+", default=[], type=_rate, metavar="RATE", help=rates)
    caps = "also each way that has one with these caps, in MiB"
    add("--caps", nargs="+", type=float, default=[], metavar="MB", help=caps)
    add("--forwards", type=int, default=1, help="of a step, before one backward (1)")
    first = "processes of a way whose first averaged step beyond compiling is measured (0)"
    add("--first", type=int, default=0, metavar="PROCESSES", help=first)
    add("--rounds", type=int, help=f"of measurement ({ROUNDS})")
    add("--round-seconds", type=float, help=f"of a way's turn in a round ({ROUND_S:g})")
    add("--timeout", type=float, default=TIMEOUT_S, help=f"s, of a way's turn ({TIMEOUT_S:g})")
    add("--quick", action="store_true", help="a tiny model, few ways, few rounds")
    return parser


def _rate(text: str) -> str:
    if not re.fullmatch(rf"\d+(\.\d+)?{UNIT}", text):
        raise argparse.ArgumentTypeError(f"must be a number of {UNIT}, but is {text!r}")
    return text


def _check(options: argparse.Namespace) -> None:
    """Complete the options.

    Raises:
        ValueError: one is off; it names the option, the rule, the value and the remedy.
    """
    quick = options.quick
    options.model = options.model or (["mlp"] if quick else list(MAKERS))
    options.size = options.size or ("tiny" if quick else "medium")
    options.ways = options.ways or list(QUICK_WAYS if quick else DEFAULT_WAYS)
    options.rounds = (2 if quick else ROUNDS) if options.rounds is None else options.rounds
    if options.round_seconds is None:
        options.round_seconds = 0.1 if quick else ROUND_S
    for name in options.model:
        subject(name, SIZES[options.size])
    least = {"ranks": 2, "rounds": 1, "forwards": 1, "first": 0}
    for name, value in least.items():
        given = getattr(options, name)
        if given < value:
            raise ValueError(f"--{name} must be at least {value}, but is {given}. Give more.")
    for name in ("round_seconds", "timeout"):
        if not getattr(options, name) > 0:
            given, option = getattr(options, name), name.replace("_", "-")
            raise ValueError(f"--{option} must be more than 0 s, but is {given}. Give more.")
    if any(not cap > 0 for cap in options.caps):
        raise ValueError(f"--caps must be more than 0 MB, but are {options.caps}. Give others.")
    options.backend = _backend(options.ranks)
    if options.rate and options.ranks != 2:
        raise ValueError(f"--rate needs --ranks 2, but they are {options.ranks}.")


def _measure(run: Run, options: argparse.Namespace, output: Path) -> None:
    """Measure all models; add to ``run``."""
    with contextlib.ExitStack() as stack:
        network = local_network(options.ranks)
        if options.rate:
            network = stack.enter_context(shaped_network())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))
        (directory / "logs").mkdir()
        # A process that is killed can leave its logs for who reads the results.
        stack.callback(shutil.copytree, directory / "logs", output / "logs", dirs_exist_ok=True)
        for model in options.model:
            cell = Comparison(model, methods_of(options), tuple(options.rate or [UNSHAPED]))
            run.cells.append(cell)
            try:
                Measuring(cell, options, network, directory).run()
            finally:
                for method in cell.methods:
                    method.end()
            if not cell.methods[0].seconds:
                run.failures[model] = cell.methods[0].wrong
            # What there is so far, if the next model is too much for the machine.
            run.write(output)


def methods_of(options: argparse.Namespace) -> list[Method]:
    """No DDP, eager DDP, and those that are asked for, at their defaults before all with caps."""
    names = list(dict.fromkeys([PLAIN, EAGER, *options.ways]))
    capped = [(name, cap) for name in names if WAYS[name].caps for cap in options.caps]
    defaults = [Method(name, answer_s=options.timeout) for name in names]
    return defaults + [Method(name, cap, answer_s=options.timeout) for name, cap in capped]


class Measuring:
    """Measures one model.

    Args:
        cell: its methods, and the rates.
        options: of the command line.
        network: whose rate is set.
        directory: for logs and caches.
    """

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
            if not method.way.measures_network:
                self._start(method, UNSHAPED)
        for rate in () if cell.methods[0].wrong else cell.rates:
            self._network.set_rate(rate)
            for method in cell.methods:
                # Its buckets follow from what it measures there.
                if method.way.measures_network and not method.wrong:
                    method.end()
                    method.planned_for = rate
                    self._start(method, rate)
            cell.measure(
                rate,
                rounds=options.rounds,
                round_s=options.round_seconds,
                on_round=functools.partial(self._say_round, rate),
            )
            for method in cell.methods:
                if method.way.measures_network and (planned := method.ask("planned")):
                    method.plans[rate] = planned[0]
            if options.first:
                self._say(f"{words_of(rate)}, first averaged steps")
                cell.measure_firsts(rate, self._place(rate), START_S, options.first)
        shutil.rmtree(self._directory / "caches", ignore_errors=True)

    def _start(self, method: Method, rate: str) -> None:
        """Start a method; twice, if its first run measures what the second plans from."""
        place = self._place(rate)
        if method.way.measures_network:
            self._say(f"{method.label}, a run that measures")
            method.start(place, START_S)
            method.ask("steps", MEASURING_STEPS)
            method.end()
        self._say(f"{method.label}, start")
        started = method.start(place, START_S) if not method.wrong else None
        if started is None:
            return
        self._cell.gradient_bytes = self._cell.gradient_bytes or started[0].gradient_bytes
        method.check(self._reference, TOLERANCE, writes=method is self._cell.methods[1])

    def _place(self, rate: str) -> Place:
        """Where ranks run, with the profiles of a network of a rate."""
        options, network = self._options, self._network
        variables = {DIRECTORY_VARIABLE: str(self._directory / "profiles" / rate)}
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
            timeout_s=options.timeout,
            backend=options.backend,
            forwards=options.forwards,
            shares_kernels=True,
        )

    def _say_round(self, rate: str, number: int) -> None:
        self._say(f"{words_of(rate)}, round {number} of {self._options.rounds}")

    def _say(self, words: str) -> None:
        print(f"{self._cell.model}: {words}", file=sys.stderr, flush=True)


def _backend(ranks: int) -> str:
    """NCCL where each rank has a GPU.

    Raises:
        ValueError: there are GPUs, but fewer than ranks.
    """
    if not torch.cuda.is_available():
        return "gloo"
    if ranks > torch.cuda.device_count():
        raise ValueError(
            f"--ranks must be at most the number of GPUs, {torch.cuda.device_count()}, but is "
            f"{ranks}. Give fewer, hide the GPUs (CUDA_VISIBLE_DEVICES=''), or use tools/gpu.py."
        )
    return "nccl"
