"""When the memory of a gradient is overwritten. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from torch import fx

from fusion_passes.graph.dependencies import write_positions
from fusion_passes.reductions.find import GradientReduction


def overwritten_positions(
    graph: fx.Graph, reductions: Sequence[GradientReduction]
) -> dict[GradientReduction, float]:
    """Index of the first node after a reduction's start that overwrites its gradient."""
    base_of, writes = write_positions(graph)
    found: dict[GradientReduction, float] = {}
    for reduction in reductions:
        positions = writes.get(base_of[reduction.gradient], [])
        following = bisect.bisect(positions, reduction.position)
        found[reduction] = positions[following] if following < len(positions) else math.inf
    return found
