"""What is worth trying, in one line, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fusion_passes.reporting.records import BucketDocument
from fusion_passes.reporting.timeline import StepTimes

NEGLIGIBLE: Final = 0.05
"""Share of a step: with less exposed communication there is nothing to gain beyond noise."""

SMALL_BYTES: Final = 2**19
"""A bucket of fewer bytes takes a network's latency, mostly."""

MOST: Final = 0.5
"""Share of the exposed time from which one bucket is what matters."""


def advice(steps: StepTimes | None, buckets: Sequence[BucketDocument]) -> str:
    """The most useful thing to try; empty where nothing was measured, or nothing is to be gained.

    Args:
        steps: times of recorded steps.
        buckets: all that ran, in the order of their launches.
    """
    if steps is None or steps.exposed_s < NEGLIGIBLE * steps.step_s:
        return ""
    share = steps.exposed_s / steps.step_s
    begin = f"{share:.0%} of a step is exposed communication"
    if steps.network_s > steps.compute_s:
        return (
            f"{begin}: the network is busy for {_ms(steps.network_s)} and the rank computes for "
            f"{_ms(steps.compute_s)}, so no order of buckets hides it all. Send less (reduce_dtype="
            '"bf16"), or less often (more samples a step, or no_sync).'
        )
    early = [item for item in buckets if item.plan.overlapped < item.plan.following]
    if early:
        return (
            f"{begin}: {_called(early[0])} is waited for {early[0].plan.waited}. Leave what reads "
            "gradients out of the compiled backward."
        )
    return f"{begin}: {_worst(steps, buckets)}"


def _worst(steps: StepTimes, buckets: Sequence[BucketDocument]) -> str:
    timed = [(item, item.times) for item in buckets if item.times is not None]
    if not timed:
        return "other collectives than the buckets' are what is not hidden."
    worst, times = max(timed, key=lambda pair: pair[1].exposed_s)
    share = times.exposed_s / steps.exposed_s
    if share < MOST:
        if any(item.plan.predicted_end_s is not None for item in buckets):
            return "no bucket has most of it. Compare the steps with those of fixed caps."
        return (
            'no bucket has most of it. Try ddp_fusion = "auto", which measures the network, or '
            "another bucket_cap_mb, and compare the steps."
        )
    names = worst.plan.parameters
    last = "the last bucket" if worst is timed[-1][0] else _called(worst)
    held = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if worst.plan.num_bytes < SMALL_BYTES:
        remedy = (
            "That is the latency of a message, which no cap makes shorter: a larger batch, or "
            "no_sync, sends fewer."
        )
    elif len(names) == 1:
        remedy = "It is a single gradient, which no cap makes smaller: reduce_dtype does."
    else:
        remedy = "A lower bucket_cap_mb launches a part of it sooner."
    return f"{last} has {share:.0%} of that: it holds {held}. {remedy}"


def _called(bucket: BucketDocument) -> str:
    return bucket.name or f"the bucket of {bucket.plan.parameters[0]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
