"""What is measured together: ranks that compute and send, in real processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fusion_passes.profile import measure
from fusion_passes.profile.measure import IN_FLIGHT, IN_FLIGHT_BYTES, Ranks, taken_per_mille
from fusion_passes.profile.records import Kind
from fusion_passes.profile.tables import CostTable

COSTS = CostTable((1024, 2048), (8_000_000, 30_000_000))


def taken(loses: float) -> int:
    """What a rank finds where compute beside an all-reduce of 8 ms takes so much longer."""
    group = dist.group.WORLD
    assert group is not None
    sent: list[int] = []
    original = dist.all_reduce

    def note(tensor, *args: Any, **kwargs: Any):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    def computing(self: Ranks, factor: torch.Tensor, count: int) -> float:
        # Rank 1 is slower, and loses more.
        beside = sent[-1] == 1024
        return count * 0.001 * (1 + dist.get_rank()) + beside * loses * (1 + dist.get_rank())

    with (
        mock.patch.object(dist, "all_reduce", note),
        mock.patch.object(Ranks, "computing", computing),
        mock.patch.object(Ranks, "times", return_value=[0.001]),
    ):
        ranks = Ranks(group, torch.device("cpu"), timedelta(seconds=30))
        return taken_per_mille(ranks, Kind("float32", "avg"), COSTS)


def many() -> list[int]:
    return [taken(loses) for loses in (0.0, 0.001, 0.1, -0.001)]


def test_what_the_slowest_rank_loses_is_the_value_of_all(run_on_ranks: Callable[..., Any]) -> None:
    assert run_on_ranks(2, many) == [[0, 250, 1000, 0]] * 2


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
        table = measure._table(ranks, Kind("float32", "avg"), seconds=60.0)
    assert set(table.times_ns) == {1_000_000}
    assert table.num_bytes == tuple(together)
    assert together[1024] == IN_FLIGHT
    assert together[IN_FLIGHT_BYTES // 2] == 2
    assert together[IN_FLIGHT_BYTES] == together[max(together)] == 1
