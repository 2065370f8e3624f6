"""Simulates steps: one model, one network, one number of ranks."""

from __future__ import annotations

import bisect
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from fusion_passes.plan.caps import MEASURED_HOLD_BYTES, MEASURED_HOLD_SHARE
from fusion_passes.plan.optimum import best_runs
from fusion_passes.plan.queue import Queue, Run, run_ends
from fusion_passes.profile.tables import MIB, CostTable
from simulation.models import Model
from simulation.networks import Network
from simulation.rivals import CAPS_MIB, merged_greedily, with_cap

RANKS: Final = (8, 32, 128, 512, 2048, 8192, 16384)
NOISE: Final = 0.02
"""Standard deviation of a rank's backward, as a part of it; a collective begins with the last."""
STEPS: Final = 8
"""Steps with noise of their own."""


@dataclass(frozen=True)
class Result:
    """Mean microseconds that a step's collectives end after its backward.

    Attributes:
        model: its name.
        network: its name.
        ranks: how many.
        backward_us: of the last rank, on average.
        exposed_us: by who has chosen the buckets.
        best_cap_mib: the cap that was best in these steps.
        buckets: how many auto makes.
    """

    model: str
    network: str
    ranks: int
    backward_us: float
    exposed_us: dict[str, float]
    best_cap_mib: int
    buckets: int

    def over(self, other: str) -> float:
        """Exposed communication of auto over that of another."""
        return self.exposed_us["auto"] / self.exposed_us[other]

    def step_over_bound(self) -> float:
        """The backward with auto's collectives over the shortest that there is."""
        auto, bound = (self.backward_us + self.exposed_us[name] for name in ("auto", "bound"))
        return auto / bound


def simulate(model: Model, network: Network, ranks: int, noise: float = NOISE) -> Result:
    """Simulate steps.

    Args:
        model: its gradients.
        network: what the ranks are joined by.
        ranks: how many, more than 1.
        noise: standard deviation of a rank's backward, as a part of it.
    """
    total = sum(model.num_bytes)
    ready = tuple(round(value * 1e9) for value in model.ready_s)
    # What a profile measures: the slowest rank of each round, and of rounds the one in the middle.
    known = 1 + noise * _last_of(ranks, 0.5)
    hold = max(MEASURED_HOLD_BYTES, total // MEASURED_HOLD_SHARE)
    earliest = tuple(_held_from(model.num_bytes, hold))
    queue = Queue(tuple(round(value * known) for value in ready), tuple(model.num_bytes), earliest)
    table, exact = network.measured(ranks, total), network.exact(ranks, total)
    chosen = {"auto": best_runs(queue, [table]).runs, "MG-WFBP": merged_greedily(queue, table)}
    chosen |= {f"{cap} MiB": with_cap(queue, cap * MIB) for cap in CAPS_MIB}
    exposed: dict[str, list[float]] = {name: [] for name in (*chosen, "bound")}
    backwards = []
    # The same noise for all that are compared.
    generator = random.Random(f"{model.name} {ranks}")
    for _ in range(STEPS):
        late = 1 + noise * _last_of(ranks, generator.random())
        step = Queue(tuple(round(value * late) for value in ready), queue.num_bytes, queue.earliest)
        backward = step.ready_ns[-1]
        backwards.append(backward / 1e3)
        for name, runs in chosen.items():
            exposed[name].append(_exposed_us(step, runs, exact))
        exposed["bound"].append((best_runs(step, [exact]).end_ns - backward) / 1e3)
    means = {name: statistics.fmean(values) for name, values in exposed.items()}
    best = min(CAPS_MIB, key=lambda cap: means[f"{cap} MiB"])
    return Result(
        model.name,
        network.name,
        ranks,
        statistics.fmean(backwards),
        means | {"best cap": means[f"{best} MiB"]},
        best,
        len(chosen["auto"]),
    )


def _held_from(num_bytes: Sequence[int], hold_bytes: int) -> list[int]:
    """For each gradient the first one that it may share a bucket with, where a bucket is closed
    once this many bytes of gradients became ready since its first one.

    Args:
        num_bytes: of all gradients that become ready, in order.
        hold_bytes: the bound.
    """
    sums = [0, *accumulate(num_bytes)]
    return [
        min(bisect.bisect_right(sums, sums[j] - hold_bytes, 0, j + 1), j)
        for j in range(len(num_bytes))
    ]


def _exposed_us(queue: Queue, runs: tuple[Run, ...], costs: CostTable) -> float:
    return (run_ends(queue, runs, [costs])[-1] - queue.ready_ns[-1]) / 1e3


def _last_of(ranks: int, chance: float) -> float:
    """How many standard deviations the last of so many normally distributed ranks is late.

    Args:
        ranks: how many.
        chance: that it is not later, from 0 to 1.
    """
    of_each = chance ** (1 / ranks)
    return statistics.NormalDist().inv_cdf(min(max(of_each, 1e-12), 1 - 1e-12))
