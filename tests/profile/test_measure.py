"""What is measured together: ranks that compute and send, in real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusion_passes.profile import measure
from fusion_passes.profile.measure import IN_FLIGHT, IN_FLIGHT_BYTES, Ranks, measure_taken
from fusion_passes.profile.records import CollectiveKind
from fusion_passes.profile.tables import MIB, CostTable, Taken

COSTS = CostTable((1024, 64 * 1024, MIB), (800_000, 1_000_000, 8_000_000))


def taken(loses_small: float, loses_large: float, launching: float = 0.0) -> Taken:
    """What a rank finds where compute beside an all-reduce takes so much longer: of 64 KiB, which
    takes 1 ms, and of 1 MiB, which takes 8. To launch some takes ``launching``."""
    group = dist.group.WORLD
    assert group is not None
    sent: list[int] = []
    original = dist.all_reduce
    loses = {4: 0.0, 64 * 1024: loses_small, MIB: loses_large}

    def note(tensor, *args: Any, **kwargs: Any):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    def computing(self: Ranks, factor: torch.Tensor, count: int) -> float:
        # Rank 1 is slower, and loses more. What was sent since the ranks have met:
        beside = list(itertools.takewhile(lambda size: size > 4, reversed(sent)))
        return (1 + dist.get_rank()) * (count * 0.001 + sum(loses[size] for size in beside))

    ticks = itertools.count()
    clock = mock.Mock(perf_counter=lambda: launching * next(ticks))
    with (
        mock.patch.object(dist, "all_reduce", note),
        mock.patch.object(measure, "time", clock),
        mock.patch.object(Ranks, "computing", computing),
        mock.patch.object(Ranks, "times", return_value=[0.001]),
    ):
        ranks = Ranks(group, torch.device("cpu"), timedelta(seconds=30))
        return measure_taken(ranks, CollectiveKind("float32", "avg"), COSTS)


LOSES = [(0.0, 0.0), (0.0001, 0.001), (0.1, 0.1), (-0.001, -0.001), (0.0002, 0.0001), (0, 0, 0.002)]


def many() -> list[Taken]:
    return [taken(*loses) for loses in LOSES]


def test_what_the_slowest_rank_loses_is_the_value_of_all(run_on_ranks: Callable[..., Any]) -> None:
    found = run_on_ranks(2, many)
    assert found[0] == found[1]
    nothing, line, all_of_it, gains, falls, launched = found[0]
    assert nothing == gains == Taken()
    assert line.of_bytes(64 * 1024) == pytest.approx(200_000, abs=2)
    assert line.of_bytes(MIB) == pytest.approx(2_000_000, abs=2)
    assert all_of_it.of_bytes(64 * 1024) == pytest.approx(1_000_000, abs=2), (
        "not more than it costs"
    )
    assert all_of_it.of_bytes(MIB) == pytest.approx(8_000_000, abs=2)
    assert falls == Taken(each_ns=200_000), "a line that does not fall"
    assert launched.of_bytes(64 * 1024) == pytest.approx(100_000, abs=2), "twenty of them"
    assert launched.of_bytes(MIB) == pytest.approx(1_000_000, abs=2), "two of them"


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
        table = measure._table(ranks, CollectiveKind("float32", "avg"), seconds=60.0)
    assert set(table.times_ns) == {1_000_000}
    assert table.num_bytes == tuple(together)
    assert (min(together), max(together)) == (1024, 64 * MIB)
    assert together[1024] == IN_FLIGHT
    assert together[IN_FLIGHT_BYTES // 2] == 2
    assert together[IN_FLIGHT_BYTES] == together[max(together)] == 1


def test_what_all_reduces_take_is_measured_with_no_more_memory_than_what_they_cost() -> None:
    together: dict[int, int] = {}

    def launch(_: Ranks, tensors: list[torch.Tensor], operation: object) -> list[dist.Work]:
        together[tensors[0].nbytes] = len(tensors)
        return []

    ranks = Ranks(mock.Mock(), torch.device("cpu"), timedelta(seconds=30))
    with (
        mock.patch.object(Ranks, "launch", launch),
        mock.patch.object(Ranks, "meet"),
        mock.patch.object(Ranks, "computing", return_value=0.0),
        mock.patch.object(Ranks, "times", return_value=[0.001]),
        mock.patch.object(Ranks, "slowest", lambda _, seconds: seconds),
    ):
        costs = CostTable((1024, 64 * 1024, 32 * MIB), (1_000, 2_000, 10_000))
        measure_taken(ranks, CollectiveKind("float32", "sum"), costs)
    assert together == {64 * 1024: 32, 32 * MIB: 1}
