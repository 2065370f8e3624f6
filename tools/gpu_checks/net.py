"""The step of each method, relative to the step without DDP, on two ranks and a network of several
rates.

The processes of all methods are alive at the same time and take turns in each round, so that they
see the same machine; the rate changes between rounds. On one GPU both ranks compute, with DDP or
not, while NCCL sends through sockets as between machines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benches.methods import MEASURING_STEPS, Comparison, Method
from benches.network import SOCKETS_ALONE, UNSHAPED, Network, best_network
from benches.processes import Place, RankProcesses
from benches.results import Row
from fusion_passes.tuning.tuner import DIRECTORY_VARIABLE
from gpu_checks import subjects
from gpu_checks.sites import Note, Site
from workloads.ways import AUTO, ONE_GRAPH, OURS, PLAIN

RANKS: Final = 2
COMPARED: Final = (PLAIN, ONE_GRAPH, "DDPOptimizer", "torch concat", *OURS, AUTO)
COMPARED_IF_SMALL: Final = (PLAIN, ONE_GRAPH, "concat", AUTO)

RATES: Final = ("25gbit", "100gbit", "10gbit")
"""In this order, in case time runs out. ``"auto"`` chooses at the first rate and is timed only
there."""

RATES_IF_SMALL: Final = ("1gbit", "10gbit")

ROUNDS: Final = 3
ROUND_S: Final = 0.4
TURN_S: Final = 40.0
START_S: Final = 120.0
RESERVE_S: Final = 30.0
"""Seconds before the part's end by which all methods must have started, so that there is time to
measure."""

END_S: Final = 8.0
STEP_GIB: Final = 11.0
"""GPU memory that a rank needs for its first step, at most: some 9 for GPT-2."""

TOLERANCE: Final = 2.0**-5
"""Largest allowed error of a gradient under bf16 autocast, divided by its largest element: 8 eps of
bf16. The error of a gradient that was not averaged, or not written, is a half or more."""

SLOW: Final = ("torch concat", AUTO)
"""Methods with the longest start, which start first."""


def gpt2(site: Site, note: Note) -> None:
    """Compare the methods on GPT-2, whose largest gradient is ready last."""
    compare(site, note, "gpt2", "tiny_gpt" if site.is_small else "gpt2")


def resnet(site: Site, note: Note) -> None:
    """Compare the methods on ResNet-50: many small gradients."""
    compare(site, note, "resnet", "tiny_resnet" if site.is_small else "resnet50")


def probe(site: Site, note: Note) -> None:
    """Run a barrier, which is an all-reduce, on two ranks in the environment of the timed ranks.

    Raises:
        RanksFailed: NCCL's error.
    """
    with best_network() as network:
        RankProcesses(PLAIN, place_of(site, "tiny_gpt", network)).kill()
    note(Row("two ranks on one GPU", words=f"{site.backend} reduces them"))


def compare(site: Site, note: Note, kind: str, model: str) -> None:
    """Measure all methods on a model of :mod:`gpu_checks.subjects`, and record the rows after each
    round."""
    names = [
        name
        for name in (COMPARED_IF_SMALL if site.is_small else COMPARED)
        # In torch, all_reduce_coalesced of Gloo refuses GPU tensors.
        if (name, site.backend, site.device) != ("coalesced", "gloo", "cuda")
    ]
    with best_network() as network:
        rates = (RATES_IF_SMALL if site.is_small else RATES) if network.devices else (UNSHAPED,)
        compared = Comparison(kind, [Method(name, answer_s=TURN_S) for name in names], rates)

        def note_all(_: int = 0) -> None:
            for row in compared.rows():
                note(row)
            kernels = "; kernels of both ranks side by side (MPS)" if site.mps else ""
            note(Row(f"{kind}: over {site.backend}", words=f"{network.words}{kernels}"))

        network.set_rate(rates[0])
        with contextlib.ExitStack() as stack:
            for method in compared.methods:
                stack.callback(method.kill)
            Starting(compared, place_of(site, model, network), site).run()
            note_all()
            for rate in rates:
                network.set_rate(rate)
                compared.measure(
                    rate,
                    rounds=1 if site.is_small else ROUNDS,
                    round_s=ROUND_S,
                    deadline=site.deadline - END_S,
                    on_round=note_all,
                )


def place_of(site: Site, model: str, network: Network) -> Place:
    """The place of the ranks of a model."""
    variables = {DIRECTORY_VARIABLE: str(Path(site.directory) / "buckets")}
    variables |= {f"{name}_SOCKET_IFNAME": network.interface for name in ("NCCL", "GLOO")}
    variables |= SOCKETS_ALONE
    # Ranks use the GPU in turns: data that one sends while the other computes has to be buffered.
    variables["NCCL_BUFFSIZE"] = str(2**24)
    # One thread sends at most some 25 Gbit/s.
    variables["NCCL_SOCKET_NTHREADS"] = "2"
    return site.place(
        RANKS,
        model=f"{subjects.__name__}:{model}",
        host=network.host,
        prefixes=network.prefixes,
        variables=variables,
        timeout_s=START_S,
    )


class Starting:
    """Starts methods in parallel, compares their gradients with the reference's, and measures their
    peak memory."""

    def __init__(self, compared: Comparison, place: Place, site: Site) -> None:
        self._compared, self._place, self._site = compared, place, site

    def run(self) -> None:
        """Start all methods."""
        methods, site = self._compared.methods, self._site
        reference = methods[1]
        # A method needs the most memory in its first step, while its backward is compiled.
        together = int(site.memory_gib / STEP_GIB / RANKS) if site.memory_gib else len(methods)
        few = max(1, min(together, len(methods)))
        self._all(self._launch, methods, "launched")
        self._all(self._wrap, methods, "wrapped")
        slow_first = sorted(methods, key=lambda method: method.name not in SLOW)
        self._all(self._start, slow_first, "started", few)
        for method in methods:
            self._compare(method)
        self._check(reference)
        others = [method for method in methods if method is not reference]
        self._all(self._check, others, "checked", few)

    def _all(
        self, step: Callable[[Method], None], methods: list[Method], done: str, together: int = 0
    ) -> None:
        with ThreadPoolExecutor(together or len(methods)) as pool:
            list(pool.map(step, methods))
        print(f"{done}, {self._site.deadline - time.monotonic():.0f} s are left", flush=True)

    def _left_s(self) -> float:
        return max(1.0, self._site.deadline - RESERVE_S - time.monotonic())

    def _launch(self, method: Method) -> None:
        method.launch(self._place, self._left_s())

    def _wrap(self, method: Method) -> None:
        method.ask("wrap", timeout_s=self._left_s())

    def _start(self, method: Method) -> None:
        # Tiny methods take turns on a few cores.
        left_s = self._left_s() if self._site.is_small else min(START_S, self._left_s())
        started = method.ask("start", timeout_s=left_s)
        if started:
            self._compared.gradient_bytes = started[0].gradient_bytes

    def _compare(self, method: Method) -> None:
        """Let ``"auto"`` compare buckets while nothing else uses the network."""
        if method.name == AUTO:
            method.planned_for = self._compared.rates[0]
            method.ask("steps", MEASURING_STEPS, timeout_s=self._left_s())

    def _check(self, method: Method) -> None:
        reference = str(self._place.directory / "gradients")
        method.check(reference, TOLERANCE, writes=method is self._compared.methods[1])
