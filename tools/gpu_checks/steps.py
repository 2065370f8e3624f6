"""A step and its peak memory under each method, over the same without DDP, on one rank.

All methods are alive at a time and take turns in each round, as in tools/bench.py, whose ranks
these are: the figure is the time over that of no DDP in the same round.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench_steps.gradients import TOLERANCE
from bench_steps.processes import Place, RowFailed, RowProcesses
from bench_steps.rows import Checked, Row, Stepped
from gpu_checks import results, subjects
from gpu_checks.sites import Note, Site
from workloads.ways import EAGER, OURS, PLAIN, TRACED, WAYS

COMPARED: Final = (
    PLAIN,
    EAGER,
    *OURS,
    "DDPOptimizer",
    "torch concat",
    "torch coalesced",
    "Python reducer",
    TRACED,
)
"""The first two are what the others are compared with."""

ROUNDS: Final = 9
ROUND_S: Final = 0.25
START_S: Final = 150.0
TURN_S: Final = 60.0
RESERVE_S: Final = 30.0
"""Before the part's end all methods must have started, so that there is time to measure."""

END_S: Final = 5.0
MAX_STEPS: Final = 50
WARM_UP_STEPS: Final = 3
CORES_OF_A_START: Final = 4
COMPILE_THREADS: Final = 8
"""At most: where the machine has the cores, torch takes 32 by default."""


def mlp(site: Site, note: Note) -> None:
    """Compare the methods on an MLP: few large gradients, and a step that is soon done."""
    compare(site, note, "mlp")


def gpt(site: Site, note: Note) -> None:
    """Compare the methods on a transformer."""
    compare(site, note, "gpt")


@dataclass
class Method:
    """A method whose processes are alive.

    Attributes:
        name: in :data:`workloads.ways.WAYS`.
        processes: one rank; ``None`` where it failed.
        count: steps of a turn.
        seconds: of a step, one for each round.
        peak_bytes: of a step.
        error: of its gradients beside eager DDP's.
        wrong: what is wrong with it.
    """

    name: str
    processes: RowProcesses | None = None
    count: int = 1
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: float | None = None
    wrong: str = ""


def compare(site: Site, note: Note, kind: str) -> None:
    """Measure all methods on a model.

    Args:
        site: where.
        note: called with the rows after each round; the last of a title counts.
        kind: of the model, in :mod:`gpu_checks.subjects`.
    """
    place = place_of(site, kind, shares_kernels=True)
    methods = [Method(name) for name in COMPARED]
    jobs = max(1, min(4, site.cores // CORES_OF_A_START))
    # Ranks end with the thread that started them: it has to live as long as they.
    with ThreadPoolExecutor(jobs) as pool, contextlib.ExitStack() as stack:
        stack.callback(_end, methods)
        # What the first has compiled, the others find.
        for method in methods[:2]:
            pool.submit(_start, method, place, site.deadline).result()
        list(pool.map(lambda method: _start(method, place, site.deadline), methods[2:]))
        for _ in _rounds(methods, site):
            # Of a part that is killed, what there is so far is shown.
            for method in methods:
                note(_row(method, methods[0], kind))


def place_of(site: Site, kind: str, *, shares_kernels: bool) -> Place:
    """Where the ranks of a model run: one, with all cores."""
    name = subjects.name_of(kind, site.memory_gib, is_small=site.is_small)
    threads = str(max(1, min(COMPILE_THREADS, site.cores)))
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": threads}
    if site.is_small:
        # Where the compiler takes milliseconds, starting its processes would take longer.
        variables = {"CUDA_VISIBLE_DEVICES": ""}
    return Place(
        model=name,
        size="tiny",
        cores=(tuple(range(site.cores)),),
        host="127.0.0.1",
        prefixes=((),),
        variables=variables,
        directory=Path(site.directory),
        timeout_s=TURN_S,
        shares_kernels=shares_kernels,
    )


def _start(method: Method, place: Place, deadline: float) -> None:
    """Start a method, compare its gradients with eager DDP's, and measure its peak."""
    if time.monotonic() > deadline - RESERVE_S:
        method.wrong = "not started: there was no time left"
        return
    try:
        method.processes = RowProcesses(Row("way", method.name), place)
        left_s = deadline - RESERVE_S - time.monotonic()
        method.processes.ask("start", timeout_s=max(1.0, min(START_S, left_s)))
        if WAYS[method.name].has_ddp:
            reference = str(place.directory / "gradients")
            (checked,) = method.processes.ask("check", reference, method.name == EAGER)
            _judge(method, checked)
        (method.peak_bytes,) = method.processes.ask("peak")
    except RowFailed as error:
        _fail(method, error)


def _judge(method: Method, checked: Checked) -> None:
    method.error = checked.error
    if not checked.compared:
        method.wrong = "compared with nothing: eager DDP failed"
    elif checked.missing:
        method.wrong = f"gradients of other parameters: {', '.join(checked.missing)}"
    elif not checked.error <= TOLERANCE:
        method.wrong = f"the gradient of {checked.worst} is off by {checked.error:.1%}"


def _fail(method: Method, error: RowFailed) -> None:
    method.wrong = method.wrong or str(error)
    if method.processes:
        method.processes.kill()
        method.processes = None


def _end(methods: Sequence[Method]) -> None:
    for method in methods:
        if method.processes:
            method.processes.end()


def _rounds(methods: Sequence[Method], site: Site) -> Iterator[None]:
    """Warm up, then let all methods take turns; come back after each round."""
    yield
    for number in range((2 if site.is_small else ROUNDS) + 1):
        for method in methods:
            if method.processes is not None and time.monotonic() < site.deadline - END_S:
                _take_turn(method, is_warm_up=number == 0, is_small=site.is_small)
        yield


def _take_turn(method: Method, *, is_warm_up: bool, is_small: bool) -> None:
    assert method.processes is not None
    try:
        stepped: list[Stepped] = method.processes.ask(
            "steps", WARM_UP_STEPS if is_warm_up else method.count
        )
    except RowFailed as error:
        _fail(method, error)
        return
    if not is_warm_up:
        method.seconds.append(statistics.median(stepped[0].seconds))
    elif not is_small:
        wanted = math.ceil(ROUND_S / min(stepped[0].seconds))
        method.count = min(MAX_STEPS, max(2, wanted))


def _row(method: Method, plain: Method, kind: str) -> results.Row:
    pairs = zip(method.seconds, plain.seconds, strict=False)
    ratios = sorted(seconds / base for seconds, base in pairs)
    peak, base = method.peak_bytes, plain.peak_bytes
    figures = {
        "ms": 1000 * statistics.median(method.seconds) if method.seconds else None,
        "time over no DDP": statistics.median(ratios) if ratios else None,
        "least": ratios[0] if ratios else None,
        "most": ratios[-1] if ratios else None,
        "peak MiB": None if peak is None else peak / 2**20,
        "peak over no DDP": peak / base if peak is not None and base else None,
    }
    # What is wrong with a method of torch's is no fault of ours.
    counts = WAYS[method.name].is_ours or method.name in COMPARED[:2]
    is_right = not counts or (bool(ratios) and not method.wrong)
    return results.Row(f"{kind}: {method.name}", is_right, method.wrong, figures)
