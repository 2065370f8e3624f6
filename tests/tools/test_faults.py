"""The runner of faults, and its rule. The programs here train nothing; those that do run under
``tools/faults.py``."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import faults
import pytest

from fault_runs.records import RankRecord, add_events, failure_of
from fault_runs.runs import MARK
from fault_runs.scenarios import QUICK, SCENARIOS, Fault, Scenario

PROGRAMS = "tests.support.fault_programs"


def scenario(program: str, **values: Any) -> Scenario:
    values = {"limit_s": 3.0, "slack_s": 1.0, "warm": False} | values
    return Scenario("fake", program=f"{PROGRAMS}:{program}", **values)


def run(tmp_path: Path, fake: Scenario) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what was recorded for each way."""
    output = tmp_path / "output"
    status = faults.main(["--mode", "concat", "--output", str(output)], [fake])
    return status, [json.loads(x) for x in (output / "results.jsonl").read_text().splitlines()]


def running() -> list[int]:
    """The processes of this test's runs that are still there."""
    mark = f"{MARK}={os.getpid()}-".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if mark in path.read_bytes() else []
    return found


def fails(seconds: float = 0.2, text: str = "Connection closed by peer") -> Scenario:
    """Peers fail as Gloo does, after 0.2 s."""
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
def test_what_breaks_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: Scenario, violation: str
) -> None:
    status, verdicts = run(tmp_path, fake)
    assert status == bool(violation)
    assert [verdict["way"] for verdict in verdicts] == [*fake.peers, "concat"]
    found = verdicts[-1]["violations"]
    assert any(violation in text for text in found) if violation else not found
    codes = [rank["exit_code"] for rank in verdicts[-1]["runs"][0]["ranks"]]
    if fake.fault and not violation:
        assert codes == [-9, 0], "killed, as one that is stopped for ever is in the end"
    said = capsys.readouterr().out
    assert "[1/1] fake" in said
    assert ("concat, rank 1: right" in said) == (codes[1] == 0)
    assert not running()


def test_a_rank_that_hangs_says_where_and_its_processes_are_gone(tmp_path: Path) -> None:
    status, verdicts = run(tmp_path, scenario("hangs", options={"hangs": ["concat"]}))
    assert status == 1
    assert verdicts[2]["violations"] == ["rank 1: hung"]
    (run_,) = verdicts[2]["runs"]
    assert [rank["exit_code"] for rank in run_["ranks"]] == [1, None]
    assert "fault_programs.py" in run_["ranks"][1]["log"], "no stack"
    assert not running()


def test_the_chain_of_an_error_is_kept() -> None:
    inner, outer = ValueError("first"), RuntimeError("second")
    outer.__context__ = inner
    assert failure_of(outer) == {
        "kinds": ["RuntimeError", "ValueError"],
        "texts": ["second", "first"],
    }


def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    fault = Fault("stop", 0, "step", continue_s=1.0)
    status, verdicts = run(tmp_path, scenario("stops", fault=fault))
    assert status == 0
    for verdict in verdicts:
        stopped, other = verdict["runs"][0]["ranks"]
        assert stopped["result"]["seconds"] > 0.9 > other["result"]["seconds"]


def test_what_failed_before_a_restart_does_not_count() -> None:
    error = {"event": "error", "kinds": ["KeyError"], "texts": ["no"], "time": 1.0, "step": 0}
    right: list[dict[str, Any]] = [{"event": "step"}, {"event": "result", "result": {}}]
    rank = RankRecord(0, exit_code=0)
    add_events(rank, [{"event": "start"}, error, {"event": "start"}, *right], origin=0.5)
    assert rank.is_right
    assert rank.first_error_s == 0.5, "when the first one came is compared"
    add_events(rank, [error], origin=0.5)
    assert not rank.is_right


def test_scenarios_have_names_of_their_own_and_some_are_quick(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [item.name for item in SCENARIOS]
    assert len(set(names)) == len(names)
    assert set(names) >= QUICK
    assert faults.main(["--list", "--quick", "--select", "kill-*"]) == 0
    assert capsys.readouterr().out == "kill-1-backward\n"
    with pytest.raises(SystemExit):
        faults.main(["--select", "nothing"])
    assert "no scenario has a name like nothing" in capsys.readouterr().err
