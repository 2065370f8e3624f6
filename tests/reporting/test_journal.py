"""What a process remembers of its graphs, also of those that another process compiled."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from fusion_passes.reporting import journal as journal_module
from fusion_passes.reporting.journal import Journal
from fusion_passes.reporting.records import FusionReport, report_plan
from fusion_passes.reporting.table import format_report
from fusion_passes.torch_private.dynamo import ddp_graph_log
from testing.graphs import plan_of, reduce, tensor, trace
from tests.reporting.test_table import REPORT

OTHER = dataclasses.replace(REPORT, digest="fedcba9876543210", mode="coalesced")
NOTHING_COPIED = dataclasses.replace(
    REPORT, buckets=tuple(dataclasses.replace(bucket, copied=()) for bucket in REPORT.buckets)
)


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Inductor's counters and cache directory of a process of its own."""
    counted: Counter[str] = Counter()
    monkeypatch.setattr(journal_module, "inductor_counters", lambda: counted)
    monkeypatch.setattr(journal_module, "cache_directory", lambda: str(tmp_path))
    return counted


def test_reports_are_oldest_first_and_stay() -> None:
    journal = Journal()
    journal.add(REPORT)
    journal.add(OTHER)
    journal.add(REPORT)
    assert journal.reports() == (REPORT, OTHER, REPORT)
    assert journal.reports() == (REPORT, OTHER, REPORT)


def test_a_report_is_complete_when_its_graph_is_lowered(counters: Counter[str]) -> None:
    journal = Journal()
    journal.expect(NOTHING_COPIED, "plan", [0, 1])
    journal.packed("plan:1", {0: "a reason", 3: "a reason", 1: "another reason"})
    assert journal.reports() == ()
    assert not counters, "what is counted is stored with the graph: it must be complete"
    journal.packed("plan:0", {})
    assert journal.reports() == (REPORT,)
    journal.packed("plan:0", {0: "a bucket that nobody expects"})
    assert journal.reports() == (REPORT,)


def test_a_graph_that_is_not_lowered_is_no_news_when_it_is_compiled_again() -> None:
    journal = Journal()
    journal.expect(NOTHING_COPIED, "plan", [0, 1])
    journal.packed("plan:0", {0: "of a compile that failed"})
    journal.expect(NOTHING_COPIED, "plan", [0, 1])
    journal.packed("plan:0", {})
    journal.packed("plan:1", {})
    assert journal.reports() == (NOTHING_COPIED,)


def test_reports_differ_in_what_was_copied(counters: Counter[str]) -> None:
    """Another setting can copy others of the same plan: neither is read for the other."""
    Journal().add(NOTHING_COPIED)
    stored = Counter(counters)
    Journal().add(REPORT)
    counters.clear()
    journal = Journal()
    journal.reports()
    counters.update(stored)
    assert [report.buckets for report in journal.reports()] == [NOTHING_COPIED.buckets]


def test_a_graph_from_the_cache_is_found_by_the_counter(counters: Counter[str]) -> None:
    Journal().add(REPORT)
    stored = Counter(counters)
    counters.clear()
    # Another process: Inductor adds what the compile had counted.
    journal = Journal()
    assert journal.reports() == ()
    counters.update(stored)
    assert journal.reports() == (dataclasses.replace(REPORT, from_cache=True),)
    counters.update(stored)
    journal.add(OTHER)
    assert [report.from_cache for report in journal.reports()] == [True, False, True]
    assert len(journal.reports()) == 3


def test_cleared_counters_are_no_news_but_what_comes_after_is(counters: Counter[str]) -> None:
    journal = Journal()
    journal.add(REPORT)
    stored = Counter(counters)
    counters.clear()
    assert len(journal.reports()) == 1
    counters.update(stored)
    assert [report.from_cache for report in journal.reports()] == [False, True]


def test_clear_forgets_what_the_counters_say_too(counters: Counter[str]) -> None:
    journal = Journal()
    journal.add(REPORT)
    counters.update(Counter(counters))
    journal.clear()
    assert journal.reports() == ()


@pytest.mark.parametrize("text", [None, "", "{", "{}", '{"buckets": 3}', "[]", "null"])
def test_a_report_that_cannot_be_read_is_a_warning(
    text: str | None, counters: Counter[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Journal().add(REPORT)
    (path,) = (tmp_path / "fusion_passes").iterdir()
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert Journal().reports() == ()
    assert REPORT.fingerprint() in caplog.text
    assert "clear the cache" in caplog.text


def test_a_report_that_cannot_be_stored_does_not_stop_the_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(journal_module, "cache_directory", lambda: str(blocked))
    journal = Journal()
    journal.add(REPORT)
    assert journal.reports() == (REPORT,)


def test_nothing_is_left_beside_the_reports(tmp_path: Path) -> None:
    Journal().add(REPORT)
    Journal().add(REPORT)
    assert [path.name for path in (tmp_path / "fusion_passes").iterdir()] == [
        f"{REPORT.fingerprint()}.json"
    ]


def test_json_keeps_everything_but_where_it_came_from() -> None:
    assert FusionReport.from_json(REPORT.to_json()) == dataclasses.replace(REPORT, from_cache=True)


def test_the_report_of_a_plan() -> None:
    def backward(x, y, z):
        gradients = [reduce(x, "a"), reduce(y, "b"), reduce(z, "c", module="ddp2")]
        return *gradients, reduce(y, "d", op="max")

    module = trace(backward, [tensor(4), tensor(2, 3), tensor(4)])
    report = report_plan(plan_of(module.graph, 1000), "concat")
    assert (report.collectives_before, report.collectives_after) == (4, 3)
    first, second = report.buckets
    assert (first.module, first.group, first.parameters) == ("DDP0", "world", ("a", "b"))
    assert (first.num_bytes, first.cap_bytes, first.dtype) == (40, 0, "float32")
    assert (second.module, second.group, second.parameters) == ("DDP2", "pairs", ("c",))
    assert [item.reason for item in report.rejections] == ["reduces by max, not by sum or avg"]
    other_mode = report_plan(plan_of(module.graph, 1000), "coalesced")
    assert other_mode.digest != report.digest


def test_the_buckets_are_logged_where_ddp_optimizer_logs_its_own() -> None:
    """Under ``TORCH_LOGS=ddp_graphs``, and not without."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = ddp_graph_log()
    log.addHandler(handler)
    try:
        Journal().add(REPORT)
        assert texts == []
        torch._logging.set_logs(ddp_graphs=True)
        log.addHandler(handler)  # It has taken all handlers away.
        Journal().add(REPORT)
        assert texts == [format_report(REPORT)]
    finally:
        torch._logging.set_logs()
        log.removeHandler(handler)
