"""From the wrapping in DDP to the end of the first step: with an empty compiler cache, and with
what the first start has left there; and what the host needs to launch a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Final

from bench_steps.processes import Place, RowFailed, RowProcesses
from bench_steps.rows import Row
from gpu_checks import results
from gpu_checks.net import place_of
from gpu_checks.shaped import Network
from gpu_checks.sites import Note, Site
from workloads.ways import PLAIN, WAYS

COMPARED: Final = (PLAIN, "concat", "DDPOptimizer")
"""Methods in their order, should time run out. Each takes half a minute."""

COMPARED_IF_SMALL: Final = (PLAIN, "concat")
KINDS: Final = ("cold", "warm")
START_S: Final = 100.0

COMPILE_THREADS: Final = 8
"""At most: where the machine has the cores, torch takes 32 by default."""


def measure(site: Site, note: Note) -> None:
    """Start each method twice, one after the other. Processes that have imported torch and built
    their model already wait for their turn: that is no part of a start, and takes as long."""
    place = place_of(site, "tiny_gpt" if site.is_small else "gpt", Network("one rank"), ranks=1)
    threads = str(1 if site.is_small else max(1, min(COMPILE_THREADS, site.cores)))
    variables = place.variables | {"TORCHINDUCTOR_COMPILE_THREADS": threads}
    place = replace(place, shares_kernels=False, variables=variables)
    names = COMPARED_IF_SMALL if site.is_small else COMPARED
    base: dict[str, float | None] = {}
    # Ranks end with the thread that started them: it has to live as long as they.
    with ThreadPoolExecutor(max(2, site.cores // 2)) as pool, contextlib.ExitStack() as stack:
        launched = {
            (name, kind): pool.submit(_launch, name, place) for name in names for kind in KINDS
        }
        stack.callback(_end, launched.values())
        wait(launched.values())
        for name in names:
            found, wrong = dict[str, float | None](), ""
            try:
                for kind in KINDS:
                    _start(launched[name, kind].result(), kind, found)
            except RowFailed as error:
                wrong = str(error)
            base = base or found
            figures = {f"{kind} s": found.get(kind) for kind in KINDS}
            figures |= {f"{kind} over no DDP": _ratio(kind, found, base) for kind in KINDS}
            host = found.get("host")
            figures["host ms a step"] = host and 1000 * host
            figures["host over no DDP"] = _ratio("host", found, base)
            is_right = not wrong or not (WAYS[name].is_ours or name == PLAIN)
            note(results.Row(f"gpt: {name}", is_right, wrong, figures))


def _launch(name: str, place: Place) -> RowProcesses:
    processes = RowProcesses(Row("way", name), place)
    processes.ask("build", timeout_s=START_S)
    return processes


def _start(processes: RowProcesses, kind: str, found: dict[str, float | None]) -> None:
    """Make a first step in a new process, and after a warm one some more."""
    processes.ask("wrap", timeout_s=START_S)
    (started,) = processes.ask("start", timeout_s=START_S)
    found[kind] = started.seconds
    if kind == KINDS[-1]:
        (found["host"],) = processes.ask("host")
    processes.kill()


def _end(launched: Iterable[Future[RowProcesses]]) -> None:
    for one in launched:
        with contextlib.suppress(RowFailed):
            one.result().kill()


def _ratio(kind: str, found: dict[str, Any], base: dict[str, Any]) -> float | None:
    value, other = found.get(kind), base.get(kind)
    return value / other if value and other else None
