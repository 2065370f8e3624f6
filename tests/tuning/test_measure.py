"""What is measured together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from fusion_passes.layout.caps import MIB
from fusion_passes.tuning import measure
from fusion_passes.tuning.measure import IN_FLIGHT, IN_FLIGHT_BYTES, Ranks


def test_a_cost_is_a_share_of_what_several_take_together() -> None:
    """Here each further one takes as long as the first."""
    together: dict[int, int] = {}

    def reduce_all(_: Ranks, tensors: list[torch.Tensor], operation: object) -> None:
        assert operation is dist.ReduceOp.AVG
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        together[tensors[0].nbytes] = len(tensors)

    def times(_: Ranks, run: Callable[[], object]) -> list[float]:
        run()
        return [0.001 * list(together.values())[-1]]

    ranks = Ranks(mock.Mock(), torch.device("cpu"), timedelta(seconds=30))
    with (
        mock.patch.object(Ranks, "reduce_all", reduce_all),
        mock.patch.object(Ranks, "times", times),
    ):
        table = measure._table(ranks, torch.float32, dist.ReduceOp.AVG, seconds=60.0)
    assert set(table.times_ns) == {1_000_000}
    assert table.num_bytes == tuple(together)
    assert (min(together), max(together)) == (1024, 64 * MIB)
    assert together[1024] == IN_FLIGHT
    assert together[IN_FLIGHT_BYTES // 2] == 2
    assert together[IN_FLIGHT_BYTES] == together[max(together)] == 1
