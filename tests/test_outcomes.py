"""The outcome of a scenario from the reports of its ranks, and the comparison of two tensors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from testing.scenarios.both_ways import tensor_difference
from testing.scenarios.entries import Scenario
from testing.scenarios.outcomes import Failure, RankReport, judge

ANY = Scenario("ddp-2", "any", "module:function")
FUSED = RankReport(0, reduced_in=("reducer",))
TRACED = RankReport(0, reduced_in=("compiled_autograd",))


def failed(text: str, rank: int = 0) -> RankReport:
    return RankReport(rank, fused=Failure(text, f"trace of {text}"))


@pytest.mark.parametrize(
    ("reports", "kind", "words"),
    [
        ([FUSED, FUSED], "equal", ""),
        ([FUSED, TRACED], "equal", ""),
        (
            [replace(FUSED, reduced_in=("reducer", "none"))],
            "broken",
            "nobody was warned on .*'none'",
        ),
        ([replace(FUSED, reduced_in=())], "broken", "nobody was warned"),
        ([FUSED, RankReport(1, warned=("why",))], "equal, unfused", "why"),
        ([RankReport(0, warned=("why",)), RankReport(1)], "broken", r"warned on ranks \[1\]"),
        ([RankReport(1, differences=("weight",))], "broken", "rank 1: weight"),
        ([failed("ddp_fusion"), failed("no", 1)], "broken", r"ranks \[0, 1\]: ddp_fusion"),
        ([failed("ddp_fusion"), FUSED], "broken", r"on ranks \[0\]: ddp_fusion"),
        ([FUSED, None], "broken", r"no result of ranks \[1\]: not done after 3 s"),
        ([RankReport(0, eager=Failure("no", ""))], "broken", "eager DDP fails: no"),
    ],
)
def test_outcomes(reports: list[RankReport | None], kind: str, words: str) -> None:
    outcome = judge(ANY, reports, fate="not done after 3 s")
    assert outcome.kind == kind
    assert re.search(words, outcome.words), outcome.words


def test_where_nothing_is_averaged_nothing_is_to_be_fused() -> None:
    scenario = Scenario("ddp-2", "any", "module:function", averages=False)
    assert judge(scenario, [replace(FUSED, reduced_in=())]).kind == "equal"


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
