"""The runner of faults, and its rule. The programs here train nothing; those that do run under
``tools/faults.py``."""

from __future__ import annotations

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


def running() -> list[str]:
    """The processes of this test's runs that are still there."""
    mark = f"{MARK}={os.getpid()}-".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if mark in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_a_training_that_ends_as_its_peers_breaks_no_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, verdicts = run(tmp_path, scenario("ends"))
    assert status == 0
    assert [verdict["way"] for verdict in verdicts] == ["eager", "compiled", "concat"]
    report = capsys.readouterr().out
    assert "[1/1] fake" in report
    assert "concat, rank 1: right" in report


def test_a_rank_that_hangs_is_reported_and_its_processes_are_gone(tmp_path: Path) -> None:
    status, verdicts = run(tmp_path, scenario("hangs", options={"hangs": ["concat"]}))
    assert status == 1
    assert verdicts[2]["violations"] == ["rank 1: hung"]
    (run_,) = verdicts[2]["runs"]
    assert [rank["exit_code"] for rank in run_["ranks"]] == [1, None]
    assert "fault_programs.py" in run_["ranks"][1]["log"], "no stack"
    assert not running()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_hang_that_the_peers_have_too_is_none_of_the_flag(tmp_path: Path) -> None:
    ways = ["eager", "compiled", "concat"]
    status, verdicts = run(tmp_path, scenario("hangs", options={"hangs": ways}))
    assert status == 0
    assert verdicts[0]["runs"][0]["ranks"][1]["exit_code"] is None


@pytest.mark.parametrize(("seconds", "violated"), [(0.3, False), (2.2, True)])
def test_an_error_that_comes_later_is_reported(
    tmp_path: Path, seconds: float, violated: bool
) -> None:
    options = {"seconds": {"concat": seconds}, "texts": {}}
    status, verdicts = run(tmp_path, scenario("fails", options=options))
    assert status == int(violated)
    found = [text for text in verdicts[2]["violations"] if "its error comes after" in text]
    assert len(found) == 2 * violated


def test_an_error_of_the_store_in_place_of_the_backends_is_reported(tmp_path: Path) -> None:
    options = {"seconds": {}, "texts": {"concat": "Failed to recv, got 0 bytes"}}
    status, verdicts = run(tmp_path, scenario("fails", options=options))
    assert status == 1
    assert "rank 0: a store's error in place of the backend's" in verdicts[2]["violations"][0]


@pytest.mark.parametrize("what", ["raises", "differs"])
def test_what_must_end_right_must(tmp_path: Path, what: str) -> None:
    status, verdicts = run(tmp_path, scenario("ends", options={what: ["concat"]}))
    assert status == 1
    words = {"raises": "must end right", "differs": "parameters differ"}[what]
    assert any(words in text for text in verdicts[2]["violations"])


def test_an_error_of_the_users_that_is_lost_is_reported(tmp_path: Path) -> None:
    options = {"raises": ["eager", "compiled"]}
    status, _ = run(tmp_path, scenario("ends", options=options))
    assert status == 0, "better than the peers"


def test_the_chain_of_an_error_is_kept() -> None:
    inner, outer = ValueError("first"), RuntimeError("second")
    outer.__context__ = inner
    assert failure_of(outer) == {
        "kinds": ["RuntimeError", "ValueError"],
        "texts": ["second", "first"],
    }


def test_what_is_left_behind_is_reported_and_ended(tmp_path: Path) -> None:
    status, verdicts = run(tmp_path, scenario("leaves"))
    assert status == 1
    (text,) = verdicts[2]["violations"]
    assert text.startswith("left behind: process ")
    assert not running()


def test_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    fault = Fault("stop", 0, "step", continue_s=1.0)
    status, verdicts = run(tmp_path, scenario("stops", fault=fault))
    assert status == 0
    for verdict in verdicts:
        stopped, other = verdict["runs"][0]["ranks"]
        assert stopped["result"]["seconds"] > 0.9 > other["result"]["seconds"]


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_a_rank_that_is_killed_or_stopped_for_ever_is_no_violation(
    tmp_path: Path, action: Any
) -> None:
    status, verdicts = run(tmp_path, scenario("stops", fault=Fault(action, 0, "step")))
    assert status == 0
    assert [rank["exit_code"] for rank in verdicts[2]["runs"][0]["ranks"]] == [-9, 0]


def test_a_fault_that_no_rank_comes_to_is_reported(tmp_path: Path) -> None:
    status, verdicts = run(tmp_path, scenario("stops", fault=Fault("kill", 0, "step", step=4)))
    assert status == 1
    assert verdicts[2]["violations"] == ["no rank has come to 'step', where the fault is"]


def test_what_is_compared_with_one_peer_need_not_be_as_good_as_the_other(tmp_path: Path) -> None:
    options = {"raises": ["compiled", "concat"]}
    status, _ = run(tmp_path, scenario("ends", options=options))
    assert status == 1
    status, verdicts = run(tmp_path, scenario("ends", options=options, peers=("compiled",)))
    assert status == 0
    assert [verdict["way"] for verdict in verdicts[3:]] == ["compiled", "concat"]


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
