"""A step under each method over the same without DDP, on two ranks and a network of several rates.

The processes of all methods are alive at a time and take turns in each round, so that they see the
same machine; the rate is changed between rounds. On one GPU both ranks compute, with DDP or not,
while NCCL sends through sockets as between machines.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench_steps.measuring import MEASURING_STEPS
from bench_steps.processes import Place, RowFailed, RowProcesses, cores_of
from bench_steps.rows import Checked, Row, Started, Stepped
from fusion_passes.profile.files import DIRECTORY_VARIABLE
from gpu_checks import results, subjects
from gpu_checks.methods import COMPARED, COMPARED_IF_SMALL, Comparison, Method
from gpu_checks.rank import BACKEND
from gpu_checks.shaped import RANKS, Network, best_network
from gpu_checks.sites import Note, Site
from workloads.ways import AUTO, EAGER, WAYS

RATES: Final = ("25gbit", "100gbit", "10gbit")
"""In this order, should time run out. ``"auto"`` plans for the first and is timed there alone."""

RATES_IF_SMALL: Final = ("1gbit", "10gbit")
UNSHAPED: Final = "unshaped"

WORKER: Final = "gpu_checks.rank"
ROUNDS: Final = 3
ROUND_S: Final = 0.4
MAX_STEPS: Final = 20
START_S: Final = 120.0
RESERVE_S: Final = 30.0
"""Before the part's end all methods must have started, so that there is time to measure."""

END_S: Final = 8.0
STEP_GIB: Final = 11.0
"""What a rank takes of the GPU in its first step, at most: GPT-2's some 9."""

TOLERANCE: Final = 2.0**-5
"""Of a gradient under bf16 autocast, over its largest element: 8 eps of bf16. One that was not
averaged, or not written, is wrong by half and more."""


SLOW: Final = ("torch concat", AUTO)


def gpt2(site: Site, note: Note) -> None:
    """Compare the methods on GPT-2, whose largest gradient is ready last."""
    compare(site, note, "gpt2", "tiny_gpt" if site.is_small else "gpt2")


def resnet(site: Site, note: Note) -> None:
    """Compare the methods on ResNet-50: many small gradients."""
    compare(site, note, "resnet", "tiny_resnet" if site.is_small else "resnet50")


def compare(site: Site, note: Note, kind: str, model: str) -> None:
    """Measure all methods on a model.

    Args:
        site: where.
        note: called with the rows after each round; the last of a title counts.
        kind: of the model, for titles.
        model: its factory in :mod:`gpu_checks.subjects`.
    """
    names = [
        name
        for name in (COMPARED_IF_SMALL if site.is_small else COMPARED)
        # In torch, all_reduce_coalesced of Gloo refuses tensors of a GPU.
        if (name, site.backend, site.device) != ("coalesced", "gloo", "cuda")
    ]
    with best_network() as network:
        rates = (RATES_IF_SMALL if site.is_small else RATES) if network.rated else (UNSHAPED,)
        compared = Comparison(kind, [Method(name) for name in names], rates)
        place = place_of(site, model, network)

        def note_all() -> None:
            for row in compared.rows():
                note(row)
            shared = f"; {site.sharing.turns}" if site.sharing.apart else ""
            note(results.Row(f"{kind}: over {site.backend}", words=network.words + shared))

        _set_rate(network, rates[0])
        # Ranks end with the thread that started them: it has to live as long as they.
        with ThreadPoolExecutor(len(names)) as pool, contextlib.ExitStack() as stack:
            stack.callback(lambda: list(pool.map(_end, compared.methods)))
            gradient_bytes = _start_all(compared.methods, place, pool, site)
            note_all()
            for rate in rates:
                _set_rate(network, rate)
                _measure(compared, rate, gradient_bytes, site, note_all)


def place_of(site: Site, model: str, network: Network, ranks: int = RANKS) -> Place:
    """Where the ranks of a model run."""
    directory = Path(site.directory)
    variables = {BACKEND: site.backend, DIRECTORY_VARIABLE: str(directory / "profiles")}
    if site.is_small:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    prefixes = network.prefixes[:ranks]
    if site.sharing.apart and ranks > 1:
        hosts = enumerate(prefixes)
        prefixes = tuple((*own, "env", f"NCCL_HOSTID=rank-{rank}") for rank, own in hosts)
    if ranks > 1:
        variables |= {f"{name}_SOCKET_IFNAME": network.interface for name in ("NCCL", "GLOO")}
        # Else NCCL would pass by the network, within the GPU.
        variables |= {f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")}
        # Ranks have the GPU in turns: what one sends while the other computes has to be there.
        variables["NCCL_BUFFSIZE"] = str(2**24)
        # One thread sends no more than some 25 Gbit/s.
        variables["NCCL_SOCKET_NTHREADS"] = "2"
    return Place(
        model=f"{subjects.__name__}:{model}",
        size="tiny",
        cores=cores_of(ranks, range(site.cores)),
        host=network.host,
        prefixes=prefixes,
        variables=variables,
        directory=directory,
        timeout_s=START_S,
        shares_kernels=True,
        worker=WORKER,
    )


def _set_rate(network: Network, rate: str) -> None:
    if network.rated is not None:
        network.rated.set_rate(rate)


def _start_all(
    methods: Sequence[Method], place: Place, pool: ThreadPoolExecutor, site: Site
) -> int:
    """Start all methods side by side, compare their gradients with eager DDP's, and measure their
    peaks; the bytes of all gradients."""

    def left_s() -> float:
        return max(1.0, site.deadline - RESERVE_S - time.monotonic())

    def launch(method: Method) -> None:
        try:
            method.processes = RowProcesses(Row("way", method.name), place)
        except RowFailed as error:
            method.fail(str(error))
        else:
            method.ask("build", timeout_s=left_s())

    def wrap(method: Method) -> None:
        method.ask("wrap", timeout_s=left_s())

    def start(method: Method) -> list[Started] | None:
        # Tiny ones take turns on a few cores.
        return method.ask("start", timeout_s=left_s() if site.is_small else min(START_S, left_s()))

    def check(method: Method) -> None:
        reference = str(place.directory / "gradients")
        if WAYS[method.name].has_ddp:
            _judge(method, method.ask("check", reference, method.name == EAGER))
        peaks = method.ask("peak")
        method.peak_bytes = max(peaks) if peaks else None

    def note(done: str) -> None:
        print(f"{done}, {site.deadline - time.monotonic():.0f} s are left", flush=True)

    list(pool.map(launch, methods))
    note("launched")
    # While nothing else is on the network, "auto" measures it.
    ordered = sorted(methods, key=lambda method: method.name != AUTO)
    wrap(ordered[0])
    list(pool.map(wrap, ordered[1:]))
    note("wrapped")
    # In its first step a method has all in memory for as long as its backward is compiled. What
    # torch traces takes longest, so it is first.
    together = int(site.memory_gib / STEP_GIB / RANKS) if site.memory_gib else len(methods)
    with ThreadPoolExecutor(max(1, min(together, len(methods)))) as few:
        started = list(few.map(start, sorted(methods, key=lambda method: method.name not in SLOW)))
        note("started")
        pool.submit(_plan, ordered[0], left_s, (launch, wrap, start)).result()
        note("planned")
        few.submit(check, methods[1]).result()
        list(few.map(check, [method for method in methods if method is not methods[1]]))
    note("checked")
    return next((sum(one[0].gradient_bytes) for one in started if one), 0)


def _plan(
    method: Method, left_s: Callable[[], float], starting: Iterable[Callable[[Method], object]]
) -> None:
    """Start ``"auto"`` once more: it plans from what the run before has measured.

    Args:
        method: that is alive; another one is left as it is.
        left_s: seconds for a command.
        starting: what starts a method, in order.
    """
    if method.name != AUTO:
        return
    method.ask("steps", MEASURING_STEPS, timeout_s=left_s())
    if method.processes is not None:
        _end(method)
        for step in starting:
            step(method)


def _judge(method: Method, answers: list[Checked] | None) -> None:
    if answers is None:
        return
    worst = max(answers, key=lambda one: one.error)
    method.error = worst.error
    if not all(one.compared for one in answers):
        method.wrong = "compared with nothing: eager DDP failed"
    elif missing := sorted({name for one in answers for name in one.missing}):
        method.wrong = f"gradients of other parameters: {', '.join(missing)}"
    elif not worst.error <= TOLERANCE:
        method.wrong = f"the gradient of {worst.worst} is off by {worst.error:.1%}"


def _end(method: Method) -> None:
    if method.processes:
        method.processes.end()


def _measure(
    compared: Comparison,
    rate: str,
    gradient_bytes: int,
    site: Site,
    note_all: Callable[[], None],
) -> None:
    """Let all methods take turns at a rate, after one that chooses how many steps fit in a turn."""
    counts: dict[str, int] = {}
    for number in range((1 if site.is_small else ROUNDS) + 1):
        for method in compared.methods:
            if time.monotonic() > site.deadline - END_S:
                return
            if method.name == AUTO and rate != compared.rates[0]:
                continue
            stepped: list[Stepped] | None = method.ask("steps", counts.get(method.name, 1))
            if stepped is None:
                continue
            seconds = max(statistics.median(one.seconds) for one in stepped)
            if number:
                method.seconds.setdefault(rate, []).append(seconds)
            counts[method.name] = min(MAX_STEPS, max(2, math.ceil(ROUND_S / seconds)))
        if number == 0:
            alone = compared.methods[0].ask("reduce", gradient_bytes, 3)
            if alone:
                compared.alone[rate] = max(statistics.median(one.seconds) for one in alone)
        note_all()
