"""From the wrapping in DDP to the end of the first step: with an empty compiler cache, and with
what the first start has left there."""

from __future__ import annotations

from typing import Final

from bench_steps.processes import Place, RowFailed, RowProcesses
from bench_steps.rows import Row, Started
from gpu_checks import results
from gpu_checks.sites import Note, Site
from gpu_checks.steps import START_S, place_of
from workloads.ways import EAGER, OURS, PLAIN, WAYS

COMPARED: Final = (PLAIN, *OURS, "DDPOptimizer", EAGER)
"""Methods in their order, should time run out."""

KIND: Final = "gpt"


def measure(site: Site, note: Note) -> None:
    """Start each method twice, one after the other."""
    place = place_of(site, KIND, shares_kernels=False)
    base: dict[str, float | None] = {}
    for name in COMPARED:
        seconds: dict[str, float | None] = {"cold": None, "warm": None}
        wrong = ""
        try:
            for kind in seconds:
                seconds[kind] = _start(name, place)
        except RowFailed as error:
            wrong = str(error)
        base = base or seconds
        figures = {f"{kind} s": value for kind, value in seconds.items()}
        figures |= {f"{kind} over no DDP": _ratio(seconds[kind], base[kind]) for kind in seconds}
        is_right = not wrong or not (WAYS[name].is_ours or name == PLAIN)
        note(results.Row(f"{KIND}: {name}", is_right, wrong, figures))


def _start(name: str, place: Place) -> float:
    """Seconds of a first step in a new process."""
    processes = RowProcesses(Row("way", name), place)
    try:
        (started,) = processes.ask("start", timeout_s=START_S)
    finally:
        processes.end()
    assert isinstance(started, Started)
    return started.seconds


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None
