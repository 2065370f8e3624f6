"""When gradients are ready by what was measured in steps. Pure.

Of a step, it is known when the last gradient of each bucket was ready, and of a graph there are
estimates for all gradients. Between two that were measured, the estimates say in which proportion
the time is shared.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.reductions.find import GradientReduction

StepsOf = Callable[[str], MeasuredSteps | None]
"""When gradients of the DDP module that owns a group name were ready in steps; ``None`` if nobody
knows."""


def no_steps(_: str) -> MeasuredSteps | None:
    """As :data:`StepsOf`, where no steps were measured."""
    return None


def by_steps(
    reductions: Sequence[GradientReduction], estimates: Sequence[int], steps_of: StepsOf
) -> tuple[dict[GradientReduction, int], int]:
    """When each gradient is ready, and in how many steps that was measured; 0 for estimates, which
    all are where those of some modules are: two clocks would not fit together.

    Args:
        reductions: in graph order.
        estimates: for each node of the graph.
        steps_of: what was measured of each module.
    """
    ready = {reduction: estimates[reduction.position] for reduction in reductions}
    found: dict[GradientReduction, int] = {}
    steps = []
    for name in dict.fromkeys(reduction.key.group_name for reduction in reductions):
        mine = [reduction for reduction in reductions if reduction.key.group_name == name]
        measured = steps_of(name)
        by_number = {reduction.owner.number: ready[reduction] for reduction in mine}
        times = corrected(by_number, measured) if measured is not None else None
        if measured is None or times is None:
            return ready, 0
        steps.append(measured.steps)
        found |= {reduction: times[reduction.owner.number] for reduction in mine}
    return found, min(steps)


def corrected(estimates: Mapping[int, int], measured: MeasuredSteps) -> dict[int, int] | None:
    """Ready times of gradients in nanoseconds, by the numbers of their parameters; ``None`` where
    the steps were of other gradients.

    Args:
        estimates: in nanoseconds from the start of the graph, of all gradients of a module.
        measured: steps of the same module, perhaps in other buckets and another order.
    """
    numbers = [number for bucket in measured.buckets for number in bucket]
    if sorted(numbers) != sorted(estimates):
        return None
    # A bucket is ready with its last gradient.
    known: dict[int, int] = {0: 0}
    for bucket, ready in zip(measured.buckets, measured.ready_ns, strict=True):
        last = max(estimates[number] for number in bucket)
        known[last] = max(known.get(last, 0), ready)
    estimated = sorted(known)
    real: list[int] = []
    for last in estimated:
        real.append(max(known[last], real[-1] if real else 0))
    return {number: _between(estimated, real, value) for number, value in estimates.items()}


def _between(estimated: list[int], real: list[int], value: int) -> int:
    """The real time of an estimate, on the line between its neighbours."""
    after = bisect.bisect_left(estimated, value)
    if estimated[after] == value:
        return real[after]
    begin, end = estimated[after - 1], estimated[after]
    rise = (real[after] - real[after - 1]) * (value - begin)
    return real[after - 1] + rise // (end - begin)
