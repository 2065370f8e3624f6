"""How others choose buckets: a fixed cap, and MG-WFBP."""

from __future__ import annotations

from typing import Final

from fusion_passes.plan.queue import Queue, Run
from fusion_passes.profile.tables import MIB, CostTable

FIRST_BYTES: Final = MIB
"""DDP's cap for the first bucket."""
CAPS_MIB: Final = (1, 2, 4, 8, 16, 25, 32, 64, 128, 256, 512)


def with_cap(queue: Queue, cap_bytes: int) -> tuple[Run, ...]:
    """Buckets as DDP fills them: each is closed by the gradient that brings it to its cap."""
    runs: list[Run] = []
    begin, size, cap = 0, 0, min(FIRST_BYTES, cap_bytes)
    for index, num_bytes in enumerate(queue.num_bytes):
        size += num_bytes
        if size >= cap:
            runs.append(Run(begin, index + 1))
            begin, size, cap = index + 1, 0, cap_bytes
    if begin < len(queue.num_bytes):
        runs.append(Run(begin, len(queue.num_bytes)))
    return tuple(runs)


def merged_greedily(queue: Queue, costs: CostTable) -> tuple[Run, ...]:
    """Buckets of MG-WFBP (Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed
    Synchronous SGD Algorithms", 2019): a gradient joins the one before if it is ready before that
    could have been sent, or so soon after that the latency saved is more."""
    latency = costs.fit().alpha_us * 1000
    runs: list[Run] = []
    begin, free = 0, 0
    for index in range(1, len(queue.num_bytes) + 1):
        start = max(free, queue.ready_ns[index - 1])
        if index < len(queue.num_bytes) and queue.ready_ns[index] - start < latency:
            continue
        runs.append(Run(begin, index))
        free = start + costs.cost_ns(sum(queue.num_bytes[begin:index]))
        begin = index
    return tuple(runs)
