"""Runs all scenarios."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fault_runs.judging import exit_words, violations
from fault_runs.records import RankRecord, RunRecord
from fault_runs.runs import run_scenario
from fault_runs.scenarios import MODES, SCENARIOS, SHARDED, Scenario, Way


@pytest.fixture(scope="session")
def runs() -> Iterator[Path]:
    """The directory of all runs."""
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def scenario(request: pytest.FixtureRequest) -> Scenario:
    """One of the scenarios that a test names."""
    chosen: Scenario = request.param
    return chosen


@pytest.fixture(scope="module")
def peers(scenario: Scenario, runs: Path) -> list[RunRecord]:
    """The records of a scenario without the flag."""
    return [_run(scenario, way, runs) for way in scenario.peers]


def _each(scenarios: Sequence[Scenario]) -> pytest.MarkDecorator:
    names = [scenario.name for scenario in scenarios]
    return pytest.mark.parametrize("scenario", scenarios, indirect=True, ids=names, scope="module")


@pytest.mark.timeout(0)  # A run has time limits of its own.
@pytest.mark.parametrize("mode", MODES)
@_each(SCENARIOS)
def test_breaks_no_rule(scenario: Scenario, peers: list[RunRecord], mode: Way, runs: Path) -> None:
    """The rules of :mod:`fault_runs.judging`."""
    found = violations(scenario, _run(scenario, mode, runs), peers)
    assert not found


@pytest.mark.timeout(0)
@_each(SHARDED)
def test_a_sharded_optimizer_breaks_no_rule(
    scenario: Scenario, peers: list[RunRecord], runs: Path
) -> None:
    """The same, with the option ``shard_optimizer``."""
    found = violations(scenario, _run(scenario, "sharded", runs), peers)
    assert not found


def _run(scenario: Scenario, way: Way, runs: Path) -> RunRecord:
    """Run a scenario, and print the record of each rank."""
    run = run_scenario(scenario, way, runs)
    for rank in run.ranks:
        print(f"{way}, rank {rank.rank}: {_words(rank)}")
        if not rank.is_right:
            print(rank.log)
    return run


def _words(rank: RankRecord) -> str:
    if rank.is_right:
        growth = rank.value_of("growth", None)
        return f"right, {growth}" if growth else "right"
    end = f"{exit_words(rank.exit_code)} at {rank.end_s:.1f} s, {rank.steps} steps"
    errors = [f"{f.brief()} at {f.after_s:.1f} s" for f in rank.failures[:2]]
    return "; ".join([end, *errors])
