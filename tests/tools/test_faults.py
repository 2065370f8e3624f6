"""The fault runner and its rule. The programs here train nothing; those that do run under
``tools/faults.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faults
import pytest

from fault_runs.judging import violations
from fault_runs.records import RankRecord, RunRecord, add_events, failure_of
from fault_runs.runs import run_scenario
from fault_runs.scenarios import Fault, Scenario
from tests.support.launch import launch

PROGRAMS = "tests.support.fault_programs"

pytestmark = pytest.mark.usefixtures("started")


def scenario(program: str, **values: Any) -> Scenario:
    values = {"limit_s": 3.0, "slack_s": 1.0, "warm": False} | values
    return Scenario("fake", program=f"{PROGRAMS}:{program}", **values)


def run(tmp_path: Path, fake: Scenario) -> tuple[list[str], list[RunRecord]]:
    """Violations of the rule, and the record of each way."""
    runs = [run_scenario(fake, way, tmp_path) for way in (*fake.peers, "concat")]
    return violations(fake, runs[-1], runs[:-1]), runs


def fails(seconds: float = 0.2, text: str = "Connection closed by peer") -> Scenario:
    """Peers fail like Gloo, after 0.2 s."""
    return scenario("fails", options={"seconds": {"concat": seconds}, "texts": {"concat": text}})


def ends(*raising: str, **values: Any) -> Scenario:
    """Rank 1 raises in some ways."""
    return scenario("ends", options={"raises": raising}, **values)


SLOW = [pytest.mark.slow, pytest.mark.nightly]
NEVER = "no rank has come to 'step', where the fault is"


@pytest.mark.parametrize(
    ("fake", "violation"),
    [
        pytest.param(ends(), "", id="as its peers"),
        pytest.param(ends("eager", "compiled"), "", id="better than its peers"),
        pytest.param(ends("concat"), "must end right", id="worse"),
        pytest.param(ends("compiled", "concat"), "must end right", id="as one of two peers"),
        pytest.param(ends("compiled", "concat", peers=("compiled",)), "", id="as its one peer"),
        pytest.param(
            scenario("ends", options={"differs": ["concat"]}), "parameters differ", id="numbers"
        ),
        pytest.param(fails(0.3), "", id="little later"),
        pytest.param(fails(2.2), "its error comes after", id="later"),
        pytest.param(fails(text="Failed to recv, got 0 bytes"), "a store's error", id="store"),
        pytest.param(
            scenario("fails", options={"seconds": {}, "texts": {}}, said={0: "closed by peer"}),
            "",
            id="said",
        ),
        pytest.param(scenario("ends", said={1: "own"}), "is in none of its errors", id="not said"),
        pytest.param(scenario("leaves"), "left behind: process ", id="left"),
        pytest.param(scenario("stops", fault=Fault("kill", 0, "step")), "", id="killed"),
        pytest.param(scenario("stops", fault=Fault("stop", 0, "step")), "", id="stopped"),
        pytest.param(
            scenario("stops", fault=Fault("kill", 0, "step", step=4)), NEVER, id="no fault"
        ),
        pytest.param(
            scenario("hangs", options={"hangs": ["eager", "compiled", "concat"]}),
            "",
            id="hangs as its peers",
            marks=SLOW,
        ),
    ],
)
def test_what_breaks_the_rule(tmp_path: Path, fake: Scenario, violation: str) -> None:
    found, runs = run(tmp_path, fake)
    assert any(violation in text for text in found) if violation else not found
    codes = [rank.exit_code for rank in runs[-1].ranks]
    if fake.fault and not violation:
        assert codes == [-9, 0], "killed, as one that is stopped for ever is in the end"


def test_a_rank_that_hangs_says_where_and_its_processes_are_gone(tmp_path: Path) -> None:
    found, runs = run(tmp_path, scenario("hangs", options={"hangs": ["concat"]}))
    assert found == ["rank 1: hung"]
    assert [rank.exit_code for rank in runs[-1].ranks] == [1, None]
    assert "fault_programs.py" in runs[-1].ranks[1].log, "no stack"


def test_the_chain_of_an_error_is_kept() -> None:
    inner, outer = ValueError("first"), RuntimeError("second")
    outer.__context__ = inner
    assert failure_of(outer) == {
        "kinds": ["RuntimeError", "ValueError"],
        "texts": ["second", "first"],
    }


def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    fault = Fault("stop", 0, "step", continue_s=1.0)
    found, runs = run(tmp_path, scenario("stops", fault=fault))
    assert not found
    for one in runs:
        stopped, other = (rank.value_of("seconds", None) for rank in one.ranks)
        assert stopped > 0.9 > other


def test_what_failed_before_a_restart_does_not_count() -> None:
    error = {"event": "error", "kinds": ["KeyError"], "texts": ["no"], "time": 1.0, "step": 0}
    right: list[dict[str, Any]] = [{"event": "step"}, {"event": "result", "result": {}}]
    rank = RankRecord(0, exit_code=0)
    add_events(rank, [{"event": "start"}, error, {"event": "start"}, *right], origin=0.5)
    assert rank.is_right
    assert rank.first_error_s == 0.5, "when the first one came is compared"
    add_events(rank, [error], origin=0.5)
    assert not rank.is_right


def test_scenarios_are_chosen_by_name_and_mode() -> None:
    chosen = "kill-1-backward and concat"
    said = launch(faults.__file__, "--collect-only", "-q", "-k", chosen).stdout
    names = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    assert names == [
        f"test_breaks_no_rule[{name}-concat]"
        for name in ("kill-1-backward", "three-kill-1-backward")
    ]
