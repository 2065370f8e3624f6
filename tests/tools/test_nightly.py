"""The tool that runs the matrix: what it selects, what it makes of what happens, and what it keeps.

The cells here are fake and compile nothing; those of the matrix run under ``make nightly``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import nightly
import pytest

from interrupting import INTERRUPTED
from nightly_matrix import pages
from nightly_matrix.cells import Cell, cells_of, select
from nightly_matrix.outcomes import KINDS, Kind, Outcome, is_worse, judge, tidy
from nightly_matrix.results import Result, ResultFile
from nightly_matrix.table import Entry, Table, read_table
from testing.scenarios.entries import Scenario
from testing.scenarios.ranks import Failure, RankReport, read_reports
from tests.support import nightly_scenarios
from tests.support.nightly_scenarios import PID_FILE

CATALOG = nightly_scenarios.__name__
ROOT = Path(nightly.__file__).parent.parent
KINDS_OF_FAKES = {
    "is-warned": "equal, unfused",
    "differs": "broken",
    "refuses": "refused",
    "raises": "broken",
    "refuses-on-one-rank": "broken",
    "dies": "broken",
}
START_S = 60
"""At most, until torchrun and torch have been imported on busy cores."""


def fakes() -> list[Cell]:
    return cells_of(nightly_scenarios.SCENARIOS)


def matrix_in(directory: Path) -> nightly.Matrix:
    return nightly.Matrix(CATALOG, directory / "works.json")


# Cells


def test_cells_have_names_of_their_own_and_targets_that_exist() -> None:
    cells = nightly.Matrix().cells()
    assert len({cell.file_name for cell in cells}) == len(cells)
    for cell in cells:
        module, _, function = cell.scenario.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), cell.name


def test_two_cells_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"twice: \['fake/coalesced/bf16/differs'"):
        cells_of([*nightly_scenarios.SCENARIOS, nightly_scenarios.SCENARIOS[1]])


@pytest.mark.parametrize(
    ("patterns", "quick", "names"),
    [
        (["fake/*/bf16/*"], False, ["fake/concat/bf16/differs", "fake/coalesced/bf16/differs"]),
        (["refuses"], False, ["fake/concat/fp32/refuses", "fake/coalesced/fp32/refuses"]),
        (
            ["refuses", "is-*"],
            True,
            ["concat/fp32/is-warned", "coalesced/fp32/is-warned", "refuses"],
        ),
    ],
)
def test_selection(patterns: list[str], quick: bool, names: list[str]) -> None:
    chosen = [cell.name for cell in select(fakes(), patterns, quick=quick)]
    assert len(chosen) == len(names)
    assert all(name.endswith(end) for name, end in zip(chosen, names, strict=True))


def test_a_pattern_that_matches_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        nightly.main(["--select", "nothing"])
    assert end.value.code == 2
    assert "'nothing' matches none of" in capsys.readouterr().err


def test_the_kept_table_is_of_one_graph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        nightly.main(["--keep", "--graph", "compiled_autograd"], matrix_in(tmp_path))
    assert end.value.code == 2
    assert "the kept table is of --graph auto" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert nightly.main(["--list", "--quick"], matrix_in(tmp_path)) == 0
    assert capsys.readouterr().out.split() == [
        "fake/concat/fp32/is-warned",
        "fake/coalesced/fp32/is-warned",
        "fake/concat/fp32/refuses",
    ]


# Outcomes

ANY = Scenario("ddp-2", "any", "any", "module:function")
FUSED = RankReport(0, gradients=4, reduced_in=("reducer",))
TRACED = RankReport(0, gradients=4, reduced_in=("compiled_autograd",), before=4, after=1)


def failed(text: str, kind: str = "ValueError", backwards: int = 0) -> RankReport:
    failure = Failure((kind, "Exception"), text, backwards, f"trace of {text}")
    return RankReport(0, fused=failure)


@pytest.mark.parametrize(
    ("reports", "kind", "words"),
    [
        ([FUSED, FUSED], "equal", ""),
        ([FUSED, TRACED], "equal", ""),
        (
            [replace(TRACED, after=4)],
            "broken",
            "nobody was warned on .*: 4 gradients.*4 of 4 traced",
        ),
        ([replace(TRACED, rejected=("why",))], "broken", "nobody was warned on .*left alone: why"),
        (
            [replace(FUSED, reduced_in=("reducer", "none"))],
            "broken",
            "nobody was warned on .*'none'",
        ),
        ([replace(FUSED, reduced_in=())], "broken", "nobody was warned"),
        ([FUSED, RankReport(1, warned=("why",))], "equal, unfused", "why"),
        ([RankReport(0, warned=("why",)), RankReport(1)], "broken", r"warned on ranks \[1\]"),
        ([RankReport(1, differences=("weight",))], "broken", "rank 1: weight"),
        ([failed("not while ddp_fusion is set")] * 2, "refused", "not while ddp_fusion is set"),
        ([failed("ddp_fusion", backwards=1)], "broken", "ValueError: ddp_fusion"),
        ([failed("ddp_fusion", kind="KeyError")], "broken", "KeyError: ddp_fusion"),
        ([failed("other words")], "broken", "ValueError: other words"),
        ([failed("ddp_fusion"), FUSED], "broken", r"on ranks \[0\] only"),
        ([FUSED, None], "broken", r"no result of ranks \[1\]: not done after 3 s"),
        ([RankReport(0, eager=Failure(("E",), "no", 0, ""))], "broken", "eager DDP fails: no"),
    ],
)
def test_outcomes(reports: list[RankReport | None], kind: str, words: str) -> None:
    outcome = judge(ANY, reports, fate="not done after 3 s", log="the log")
    assert outcome.kind == kind
    assert re.search(words, outcome.words), outcome.words


@pytest.mark.parametrize(
    ("reports", "kind"),
    [
        ([failed("ddp_fusion: no gradient of middle.weight")], "refused"),
        ([failed("eager's", backwards=1), failed("ddp_fusion: of middle.weight")], "refused"),
        ([failed("ddp_fusion: no gradient of some parameter")], "broken"),
        ([FUSED], "broken"),
    ],
)
def test_what_must_fail(reports: list[RankReport], kind: str) -> None:
    scenario = Scenario("ddp-2", "any", "any", "module:function", must_fail="middle.weight")
    assert judge(scenario, reports, fate="", log="").kind == kind


def test_where_nothing_is_averaged_nothing_is_to_be_fused() -> None:
    scenario = Scenario("ddp-2", "any", "any", "module:function", averages=False)
    assert judge(scenario, [replace(FUSED, reduced_in=())], fate="", log="").kind == "equal"


def test_the_order_of_outcomes() -> None:
    assert KINDS == ("equal", "equal, unfused", "refused", "broken")
    assert is_worse("broken", "refused")
    assert not is_worse("refused", "refused")


def test_words_are_the_same_on_each_machine_and_in_each_run() -> None:
    text = "\x1b[31m/home/me/lib/x.py at 0x7f00: [127.0.0.1]:40123\n Timed out after 20000ms"
    assert tidy(text) == "x.py at 0x...: [127.0.0.1]:PORT Timed out after some ms"
    assert len(tidy("long " * 1000)) == 600


def test_reports_of_ranks_come_back_as_they_were(tmp_path: Path) -> None:
    reports = [RankReport(0, warned=("a", "b")), failed("words")]
    for rank, report in enumerate(reports):
        RankReport(**{**vars(report), "rank": rank}).write(tmp_path)
    first, second, third = read_reports(tmp_path, 3)
    assert first == reports[0]
    assert second is not None
    assert second.fused == reports[1].fused
    assert third is None


# The kept table


def result(cell: str, kind: Kind, torch: str = "2.13.0") -> Result:
    return Result(cell, Outcome(kind, f"words of {cell}"), 1.0, torch)


def test_a_table_knows_what_got_worse_and_what_got_better() -> None:
    table = Table("2.13.0", {"a": Entry("equal"), "b": Entry("refused"), "c": Entry("broken")})
    results = {name: result(name, "refused") for name in "abcd"}
    assert table.worse(results) == ["a"]
    assert table.better(results) == ["c"]


def test_a_part_is_kept_with_the_rest(tmp_path: Path) -> None:
    cells = fakes()
    names = [cell.name for cell in cells]
    table = Table("2.13.0", {names[0]: Entry("equal"), "gone": Entry("equal")})
    updated = table.updated(cells, {names[1]: result(names[1], "refused")}, "2.13.0")
    path = tmp_path / "works.json"
    path.write_text(updated.to_json())
    assert read_table(path) == updated
    assert set(updated.entries) == {names[0], names[1]}
    with pytest.raises(ValueError, match=r"1 kept cells are of torch 2\.13\.0"):
        table.updated(cells, {names[1]: result(names[1], "equal")}, "2.15.0")


def test_an_outcome_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "works.json"
    path.write_text(json.dumps({"torch": "2.13.0", "cells": {"a": {"outcome": "fine"}}}))
    with pytest.raises(ValueError, match=r"a must be one of .* but is 'fine'"):
        read_table(path)


def test_the_kept_table_has_no_cell_that_there_is_not() -> None:
    assert set(read_table(nightly.KEPT).entries) <= {cell.name for cell in nightly.Matrix().cells()}


def test_the_kept_table_is_what_the_catalog_says() -> None:
    """Tests hold the package to the catalog, the matrix to the table."""
    entries = read_table(nightly.KEPT).entries
    for cell in nightly.Matrix().cells():
        scenario, entry = cell.scenario, entries.get(cell.name)
        if entry is not None:
            assert entry.outcome == scenario.becomes, cell.name
            assert all(words in entry.words for words in scenario.warns), cell.name
            is_told = bool(scenario.warns) or scenario.becomes == "refused"
            assert bool(entry.words) == is_told, cell.name


def test_the_page_is_made_from_the_kept_table() -> None:
    cells, table = nightly.Matrix().cells(), read_table(nightly.KEPT)
    remedy = "run: python tools/nightly.py --page"
    assert (ROOT / "docs" / "works.md").read_text() == pages.kept_page(cells, table), remedy
    assert nightly.KEPT.read_text() == table.to_json()


def test_every_cell_has_a_group_with_a_title() -> None:
    found = {cell.scenario.target.partition(":")[0] for cell in nightly.Matrix().cells()}
    assert found == {f"testing.scenarios.features.{name}" for name in pages.GROUPS}


def test_a_group_says_each_thing_once() -> None:
    """Dtypes that end alike share a line, and equal words a note; only modes that differ are
    named."""
    plain = Scenario("ddp-2", "plain", "plain", "features.loops:plain", dtypes=("fp32", "bf16"))
    other = Scenario("ddp-4", "other", "other", "features.loops:other", ranks=4)
    warned = Entry("equal, unfused", "DDP 0 (Sequential) and DistributedDataParallel(_Net): why.")
    entries = {
        "ddp-2/concat/fp32/plain": warned,
        "ddp-2/coalesced/fp32/plain": warned,
        "ddp-2/concat/bf16/plain": warned,
        "ddp-2/coalesced/bf16/plain": warned,
        "ddp-4/concat/fp32/other": Entry("equal"),
        "ddp-4/coalesced/fp32/other": Entry("refused", "DistributedDataParallel(static_graph): no"),
    }
    page = pages.kept_page(cells_of([plain, other]), Table("2.13.0", entries))
    assert page.partition("## ")[2] == (
        "Training loops\n\n"
        "| what | ranks | dtypes | result | note |\n"
        "| --- | ---: | --- | --- | ---: |\n"
        "| plain | 2 | fp32, bf16 | equal, unfused | 1 |\n"
        "| other | 4 |  | concat: equal; coalesced: refused | 2 |\n\n"
        "1. DDP 0 and DistributedDataParallel(model): why.\n"
        "2. coalesced: DistributedDataParallel(static\\_graph): no\n"
    )


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """The exit status and directory of a run of the fake cells that end by themselves."""
    directory = tmp_path_factory.mktemp("run")
    entries = {
        "fake/concat/fp32/is-warned": Entry("equal"),
        "fake/concat/fp32/refuses": Entry("refused"),
        "fake/concat/fp32/raises": Entry("broken"),
    }
    (directory / "works.json").write_text(Table("2.13.0", entries).to_json())
    chosen = [f"--select=fake/concat/fp32/{name}" for name in KINDS_OF_FAKES]
    arguments = [*chosen, "--jobs=2", "--graph=compiled_autograd", "--output", str(directory)]
    return nightly.main(arguments, matrix_in(directory)), directory


def results_in(directory: Path) -> dict[str, Result]:
    version = importlib.metadata.version("torch").partition("+")[0]
    return ResultFile(directory).read(version)


@pytest.mark.slow
@pytest.mark.xdist_group("fake cells")
def test_each_cell_gets_its_outcome(run: tuple[int, Path]) -> None:
    results = results_in(run[1])
    kinds = {name.split("/")[-1]: result.outcome.kind for name, result in results.items()}
    assert kinds == KINDS_OF_FAKES
    words = {name.split("/")[-1]: result.outcome.words for name, result in results.items()}
    assert (
        words["is-warned"] == "Not fused, because it is fake and has compiled_autograd. Do without."
    )
    assert "differs by" in words["differs"]
    assert words["raises"] == "RuntimeError: this one names no flag"
    assert "on ranks [1] only" in words["refuses-on-one-rank"]
    details = {name.split("/")[-1]: result.outcome.detail for name, result in results.items()}
    assert "and has a second line" in details["raises"]


@pytest.mark.slow
@pytest.mark.xdist_group("fake cells")
def test_a_cell_that_got_worse_fails_the_run(
    run: tuple[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, directory = run
    assert status == 1
    arguments = ["--resume", str(directory), "--select=fake/concat/fp32/is-warned"]
    assert nightly.main(arguments, matrix_in(directory)) == 1
    assert "worse: fake/concat/fp32/is-warned: equal, unfused, was equal" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.xdist_group("fake cells")
def test_junit(run: tuple[int, Path]) -> None:
    suite = ElementTree.parse(run[1] / "junit.xml").getroot()
    counts = {name: suite.attrib[name] for name in ("tests", "failures", "skipped")}
    assert counts == {"tests": "6", "failures": "5", "skipped": "1"}
    (refused,) = suite.findall("testcase[@name='refuses']/skipped")
    assert "fake=True is not supported" in refused.attrib["message"]


@pytest.mark.slow
@pytest.mark.xdist_group("fake cells")
def test_pages(run: tuple[int, Path]) -> None:
    page = (run[1] / "report.html").read_text()
    assert '<td class="unfused worse"' in page
    assert "was: equal" in page
    assert "this one names no flag" in page
    text = (run[1] / "report.md").read_text()
    assert "| what refuses | refused |  | concat: fake=True is not supported" in text


@pytest.mark.slow
@pytest.mark.xdist_group("fake cells")
def test_keeping(run: tuple[int, Path], tmp_path: Path) -> None:
    names = [f"--select=fake/concat/fp32/{name}" for name in KINDS_OF_FAKES]
    matrix = matrix_in(tmp_path)
    assert nightly.main(["--resume", str(run[1]), *names, "--keep"], matrix) == 0
    kept = {name.split("/")[-1]: e.outcome for name, e in read_table(matrix.kept).entries.items()}
    assert kept == KINDS_OF_FAKES
    page = tmp_path / "works.md"
    text = page.read_text()
    assert "6 cells, 1 equal, unfused; 1 refused; 4 broken" in text
    page.unlink()
    assert nightly.main(["--page"], matrix) == 0
    assert page.read_text() == text


@pytest.mark.slow
def test_a_run_is_taken_up_again(tmp_path: Path) -> None:
    """What is done is not run again; a torn line, and a result of another torch, do not count."""
    file = ResultFile(tmp_path)
    version = importlib.metadata.version("torch").partition("+")[0]
    warned, other = "fake/concat/fp32/is-warned", "fake/coalesced/fp32/is-warned"
    file.append(result(warned, "broken", version))
    file.append(result(other, "equal", "1.0"))
    with (tmp_path / "results.jsonl").open("a") as lines:
        lines.write('{"cell": "fake/coal')
    arguments = ["--resume", str(tmp_path), "--select=is-warned"]
    assert nightly.main(arguments, matrix_in(tmp_path)) == 0
    kinds = {name: result.outcome.kind for name, result in results_in(tmp_path).items()}
    assert kinds == {warned: "broken", other: "equal, unfused"}


@pytest.mark.slow
def test_a_cell_that_hangs_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv(PID_FILE, str(pid_file))
    for seconds in (12, START_S):  # All of it passes; on busy cores the first is over too soon.
        output = tmp_path / str(seconds)
        arguments = [
            "--select=fake/concat/*/hangs",
            f"--timeout={seconds}",
            "--output",
            str(output),
        ]
        assert nightly.main(arguments, matrix_in(tmp_path)) == 0
        if pid_file.exists():
            break
    ((_, hung),) = results_in(output).items()
    assert hung.outcome.kind == "broken"
    assert hung.outcome.words == f"no result of ranks [0]: not done after {seconds} s"
    assert "nightly_scenarios.py" in hung.outcome.detail, "the stack shows where it hangs"
    assert not _is_alive(int(pid_file.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_an_interrupted_run_ends_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    arguments = ["--select=fake/concat/*/hangs", "--output", str(tmp_path)]
    call = f"nightly.main({arguments}, nightly.Matrix({CATALOG!r}))"
    program = f"import nightly, sys; sys.exit({call})"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    environment = os.environ | {PID_FILE: str(pid_file), "PYTHONPATH": paths}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        deadline = time.monotonic() + START_S
        while not pid_file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(20) == INTERRUPTED
    finally:
        process.kill()
        process.wait()
    assert not _is_alive(int(pid_file.read_text()))
    assert (tmp_path / "junit.xml").exists()


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
