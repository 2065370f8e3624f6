"""Time from the wrapping in DDP to the end of the first step, with an empty compiler cache and with
the cache of the first start; and CPU seconds of a step, which the host needs to launch it."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benches.methods import Method
from benches.results import Row
from gpu_checks import subjects
from gpu_checks.sites import Note, Site
from workloads.ways import PLAIN

COMPARED: Final = (PLAIN, "concat", "DDPOptimizer")
"""Methods in their order, in case time runs out. Each takes half a minute."""

COMPARED_IF_SMALL: Final = (PLAIN, "concat")
KINDS: Final = ("cold", "warm")
START_S: Final = 100.0
"""Time limit on a GPU, in seconds."""

STEPS: Final = 20

COMPILE_THREADS: Final = 8
"""Maximum number: if the machine has the cores, torch uses 32 by default."""


def measure(site: Site, note: Note) -> None:
    """Measure a cold and a warm start of each method, one after the other. All processes import
    torch and build their models before, which takes as long and is not part of a start."""
    threads = 1 if site.is_small else max(1, min(COMPILE_THREADS, site.cores))
    answer_s = site.deadline - time.monotonic() if site.is_small else START_S
    place = site.place(
        1,
        model=f"{subjects.__name__}:{'tiny_gpt' if site.is_small else 'gpt'}",
        variables={"TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
        timeout_s=answer_s,
        shares_kernels=False,
    )
    names = COMPARED_IF_SMALL if site.is_small else COMPARED
    launched = [Method(name, answer_s=answer_s) for name in names for _ in KINDS]
    base: dict[str, float | None] = {}
    with contextlib.ExitStack() as stack:
        for method in launched:
            stack.callback(method.kill)
        with ThreadPoolExecutor(max(2, site.cores // 2)) as pool:
            list(pool.map(lambda method: method.launch(place, answer_s), launched))
        for cold, warm in zip(launched[::2], launched[1::2], strict=True):
            found = _start(cold, warm)
            base = base or found
            figures = dict(found)
            for name, value in found.items():
                other = base[name]
                figures[f"{name} over no DDP"] = value / other if value and other else None
            wrong = cold.wrong or warm.wrong
            is_right = not wrong or not (cold.way.is_ours or cold.name == PLAIN)
            note(Row(f"gpt: {cold.name}", is_right, wrong, figures))


def _start(cold: Method, warm: Method) -> dict[str, float | None]:
    """Run the first steps of a cold and of a warm start, and further steps after the warm start.
    Return the times."""
    found: dict[str, float | None] = {"cold s": None, "warm s": None, "CPU ms a step": None}
    for kind, method in zip(KINDS, (cold, warm), strict=True):
        method.ask("wrap")
        started = method.ask("start")
        if started is None:
            return found
        found[f"{kind} s"] = started[0].seconds
        if method is warm and (stepped := method.ask("steps", STEPS)):
            found["CPU ms a step"] = 1000 * stepped[0].cpu_s / STEPS
        method.kill()
    return found
