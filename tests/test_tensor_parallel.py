"""DDP over one dimension of a mesh and tensor parallelism over the other, on four ranks."""

from __future__ import annotations

import pytest

from tests.support import scenarios
from tests.support.equality import tensor_difference
from tests.support.processes import RankPool
from tests.support.scenarios import Scenario

EPS = 8.0
"""What gradients of a model with a norm may differ by, in eps of a tensor's largest element."""


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@pytest.mark.parametrize(
    ("scenario", "tolerance_eps"),
    [(scenarios.tensor_parallel, 0.0), (scenarios.sequence_parallel, EPS)],
    ids=["columns and rows", "sequence"],
)
def test_gradients_are_those_of_eager_ddp(
    scenario: Scenario, tolerance_eps: float, mode: str
) -> None:
    # Processes of its own: DTensor's caches keep meshes, also of process groups that are destroyed.
    with RankPool(4) as ranks:
        outcomes = ranks.run(scenarios.run_both_ways, scenario=scenario, flag=mode)
    for rank, outcome in enumerate(outcomes):
        differences = {
            name: difference
            for name, value in outcome.flagged.items()
            if (difference := tensor_difference(value, outcome.eager[name], tolerance_eps))
        }
        assert not differences, f"rank {rank}: {differences}"
        assert outcome.told == []
        assert len(outcome.fused) == len({name for name in outcome.flagged if ": " not in name})
