"""What the Python reducer lacks is trained by DDP's own reducer: right, and the user is warned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from testing.equality import tensor_difference
from tests.support import scenarios
from tests.support.scenarios import Outcome, Scenario

RUN = Callable[..., list[Any]]


def run(run_on_ranks: RUN, scenario: Scenario, ranks: int = 2) -> list[Outcome]:
    """The outcome on each rank, which must be that of eager DDP in every bit."""
    outcomes = run_on_ranks(ranks, scenarios.run_both_ways, scenario=scenario, flag="concat")
    for rank, outcome in enumerate(outcomes):
        assert outcome.eager.keys() == outcome.flagged.keys()
        differences = {
            name: difference
            for name, value in outcome.flagged.items()
            if (difference := tensor_difference(value, outcome.eager[name], 0.0))
        }
        assert not differences, f"rank {rank}: {differences}"
    return outcomes


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (scenarios.delayed_reductions, "it was given delay_all_reduce_named_params=..."),
        (scenarios.buffer_hook, "a hook of yours synchronises its buffers"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_handed_over(run_on_ranks: RUN, scenario: Scenario, words: str) -> None:
    for outcome in run(run_on_ranks, scenario):
        (warned,) = outcome.warned
        assert "is trained by DDP's own reducer, as without ddp_fusion" in warned
        assert words in warned
        assert outcome.fused == set()


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.unused_in_a_static_graph,
        scenarios.disabled_join,
        scenarios.caps_in_a_list,
        pytest.param(scenarios.copied, marks=pytest.mark.each_torch),
        pytest.param(scenarios.saved_and_loaded, marks=pytest.mark.each_torch),
        scenarios.state_dict_of_another,
        scenarios.second_module_over_the_same_model,
        pytest.param(scenarios.hooks_of_users, marks=pytest.mark.each_torch),
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_not_handed_over(run_on_ranks: RUN, scenario: Scenario) -> None:
    for outcome in run(run_on_ranks, scenario):
        assert outcome.warned == []
        assert len(outcome.fused) == 6


def test_another_process_group(run_on_ranks: RUN) -> None:
    for outcome in run(run_on_ranks, scenarios.another_process_group, ranks=4):
        assert outcome.warned == []
        assert len(outcome.fused) == 6


def test_the_forward_decides_which_backward_is_averaged(run_on_ranks: RUN) -> None:
    for outcome in run(run_on_ranks, scenarios.no_sync_around_a_forward_or_its_backward):
        assert len(outcome.warned) == 1
        assert "stay on their rank, as with eager DDP: its forward has had its" in outcome.warned[0]
        assert len(outcome.fused) == 6


def test_another_process_group_after_an_error(run_on_ranks: RUN) -> None:
    for outcome in run(run_on_ranks, scenarios.another_process_group_after_an_error):
        assert outcome.warned == []
        assert len(outcome.fused) == 6


@pytest.mark.parametrize(
    "scenario",
    [scenarios.two_reducers_in_one_backward, scenarios.beside_fully_sharded],
    ids=lambda scenario: scenario.__name__,
)
def test_a_backward_that_others_must_see_is_not_traced(
    run_on_ranks: RUN, scenario: Scenario
) -> None:
    for outcome in run(run_on_ranks, scenario):
        warned = "\n".join(outcome.warned)
        assert (
            "A backward reaches parameters of a DDP module under ddp_fusion, and others" in warned
        )
        assert warned.count("are reduced when it has ended") == 1


@pytest.mark.each_torch
def test_one_module_of_each_kind(run_on_ranks: RUN) -> None:
    for outcome in run(run_on_ranks, scenarios.two_reducers_in_two_backwards):
        assert len(outcome.warned) == 1
        assert outcome.fused == {
            f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")
        }
