"""The scenarios of the catalogue for a reducer that has its layout before the first backward, as in
the mode ``"auto"``, in an order that no backward has."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Piece, lay_out, plan_layout
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.tuning.choice import candidates, piece_caps
from fusion_passes.tuning.tuner import EACH_PIECE
from testing.processes import RUN
from testing.scenarios.entries import Scenario
from testing.scenarios.outcomes import RankReport
from tests.reducer.test_scenarios import cases, train

_CHECKED: Final = (
    *("static-graph-unused", "static-graph-without-some", "static-graph-changes"),
    "static-graph-reentrant",
    *("join-several-times", "join-static-graph", "unused-some", "unused-changing"),
)
"""Features that depend on a first backward with a layout, on two ranks; nightly jobs train all."""

BY_BUCKET: Final = ("hook-powersgd", "hook-wrapper-powersgd")
"""Features whose result for a bucket depends on the gradients in it: eager DDP has other
buckets."""

COUNTED: Final = "collectives instead of"
"""A difference in the number of collectives: one for each bucket. Eager DDP has fewer."""

IN_A_BUCKET: Final = 3


def give_layout(reducer: Any) -> None:
    """Give a reducer a layout as if learned: parameters in no order, several per bucket."""
    kinds = reducer.parameters.kinds
    mixed = sorted(kinds, key=lambda number: (number * 7919 % 13, number))
    buckets: list[Piece] = []
    by_kind = sorted(mixed, key=lambda n: (str(kinds[n].dtype), str(kinds[n].device)))
    for kind, numbers in itertools.groupby(by_kind, lambda n: (kinds[n].dtype, kinds[n].is_sparse)):
        size = 1 if kind[1] else IN_A_BUCKET
        listed = list(numbers)
        buckets += [tuple(listed[i : i + size]) for i in range(0, len(listed), size)]
    reducer.fix_layout(lay_out([[(n,) for n in bucket] for bucket in buckets], kinds))


class Changing:
    """Takes the place of a tuner."""

    def __init__(self) -> None:
        self.steps = 0

    def end_iteration(self, reducer: Reducer) -> None:
        if reducer.steps == self.steps or not isinstance(reducer.queue.communication, AllReduce):
            return
        self.steps, assignment = reducer.steps, reducer.assignment
        kinds = reducer.parameters.kinds
        size = sum(kind.nbytes for kind in kinds.values()) // IN_A_BUCKET
        layouts = [*candidates(assignment.pieces, kinds, BucketCaps(size, size)).values()]
        reducer.fix_layout(layouts[self.steps % len(layouts)])
        assignment.graph_layout = plan_layout(assignment.pieces, kinds, EACH_PIECE)


def change_layout(reducer: Reducer) -> None:
    """Change the layout after each step."""
    size = sum(kind.nbytes for kind in reducer.parameters.kinds.values()) // IN_A_BUCKET
    reducer.assignment.piece_caps = piece_caps(BucketCaps(size, size))
    reducer.tuner = Changing()


def train_given(scenario: Scenario, learn: Callable[[Reducer], None]) -> RankReport:
    """Train a scenario with given layouts; a job for every rank."""
    slices = dataclasses.replace(reducers.slices, learn_layout=learn)
    with mock.patch.object(reducers, "slices", slices):
        return train(scenario, "auto", scenario.dtypes[0])


@pytest.mark.parametrize("learn", [give_layout, change_layout])
@pytest.mark.parametrize("scenario", cases(lambda s: s.feature not in BY_BUCKET, _CHECKED))
def test_trains_as_eager_ddp(
    run_on_ranks: RUN, scenario: Scenario, learn: Callable[[Reducer], None]
) -> None:
    reports = run_on_ranks(scenario.ranks, train_given, scenario=scenario, learn=learn)
    for report in reports:
        found = [item for item in report.differences if COUNTED not in item]
        assert found == []
        if scenario.averages and scenario.becomes == "equal":
            assert report.is_fused, report
