"""What the scenarios stand on: most of their models round nothing, so that eager DDP and the flag
must give the same in every bit, and a difference of one bit is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from testing.equality import tensor_difference
from testing.scenarios.both_ways import differences, target_of
from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import Scenario
from testing.scenarios.run import Run

EXACT = ("dynamic", "several-backwards", "bucket-cap", "two-caps", "tied", "layouts", "scalars")


def train_in_both_precisions(scenario: Scenario) -> list[str]:
    """A job for every rank: in what eager DDP differs in fp64, which has 29 bits more."""
    runs = [
        Run("eager", dtype, torch.device("cpu"), casts=True)
        for dtype in (torch.float32, torch.float64)
    ]
    for run in runs:
        target_of(scenario)(run)
    single, double = runs
    for tensors in (*double.backwards, double.end):
        for name, value in tensors.items():
            assert value is not None
            assert torch.equal(value.float().double(), value), f"{name} has more bits than fp32"
            tensors[name] = value.float()
    return differences(single, double, 0.0)


@pytest.mark.parametrize("feature", EXACT)
def test_exact_models_round_nothing(run_on_ranks: Callable[..., list[Any]], feature: str) -> None:
    (scenario,) = [s for s in SCENARIOS if (s.parallelism, s.feature) == ("ddp-2", feature)]
    assert run_on_ranks(2, train_in_both_precisions, scenario=scenario) == [[], []]


def test_a_difference_of_one_bit_is_found() -> None:
    one = torch.ones(2, 2)
    next_to_one = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-23]])
    assert tensor_difference(next_to_one, one, 0.0) is not None
    assert tensor_difference(next_to_one, one, 1.0) is None
    assert tensor_difference(one * 2, one, 32.0) is not None
    assert tensor_difference(one * float("nan"), one, 1e9) is not None
    assert tensor_difference(torch.ones(2, 3).t(), torch.ones(3, 2), 0.0) is not None
    assert tensor_difference(one.double(), one, 1.0) is not None
    assert tensor_difference(None, one, 1.0) is not None
