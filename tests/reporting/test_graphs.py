"""What a process remembers of its graphs, also of those that another process compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.reporting import graphs
from fusion_passes.reporting.graphs import CompileLog, one_for_each_plan, report_plan
from testing.graphs import plan_of, reduce, tensor, trace
from tests.reporting.test_table import REPORT

OTHER = dataclasses.replace(REPORT, digest="fedcba9876543210", mode="coalesced")
NOTHING_COPIED = dataclasses.replace(
    REPORT, buckets=tuple(dataclasses.replace(bucket, copied=()) for bucket in REPORT.buckets)
)


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Inductor's counters of a process of its own."""
    counted: Counter[str] = Counter()
    monkeypatch.setattr(graphs, "inductor_counters", lambda: counted)
    return counted


def test_reports_are_oldest_first_and_stay() -> None:
    log = CompileLog()
    log.add(REPORT)
    log.add(OTHER)
    log.add(REPORT)
    assert log.reports() == (REPORT, OTHER, REPORT)
    assert log.reports() == (REPORT, OTHER, REPORT)


def test_a_report_is_complete_when_its_graph_is_lowered(counters: Counter[str]) -> None:
    log = CompileLog()
    log.expect(NOTHING_COPIED, "plan", [0, 1])
    log.packed("plan:1", {0: "a reason", 3: "a reason", 1: "another reason"})
    assert log.reports() == ()
    assert not counters, "what is counted is stored with the graph: it must be complete"
    log.packed("plan:0", {})
    assert log.reports() == (REPORT,)
    log.packed("plan:0", {0: "a bucket that nobody expects"})
    assert log.reports() == (REPORT,)


def test_a_graph_that_is_not_lowered_is_no_news_when_it_is_compiled_again() -> None:
    log = CompileLog()
    log.expect(NOTHING_COPIED, "plan", [0, 1])
    log.packed("plan:0", {0: "of a compile that failed"})
    log.expect(NOTHING_COPIED, "plan", [0, 1])
    log.packed("plan:0", {})
    log.packed("plan:1", {})
    assert log.reports() == (NOTHING_COPIED,)


def test_reports_differ_in_what_was_copied(counters: Counter[str]) -> None:
    """Another setting can copy others of the same plan: neither is read for the other."""
    CompileLog().add(NOTHING_COPIED)
    stored = Counter(counters)
    CompileLog().add(REPORT)
    counters.clear()
    log = CompileLog()
    log.reports()
    counters.update(stored)
    assert [report.buckets for report in log.reports()] == [NOTHING_COPIED.buckets]


def test_a_graph_from_the_cache_is_found_by_the_counter(counters: Counter[str]) -> None:
    CompileLog().add(REPORT)
    stored = Counter(counters)
    counters.clear()
    # Another process: Inductor adds what the compile had counted.
    log = CompileLog()
    assert log.reports() == ()
    counters.update(stored)
    assert log.reports() == (dataclasses.replace(REPORT, from_cache=True),)
    counters.update(stored)
    log.add(OTHER)
    assert [report.from_cache for report in log.reports()] == [True, False, True]
    assert len(log.reports()) == 3


def test_cleared_counters_are_no_news_but_what_comes_after_is(counters: Counter[str]) -> None:
    log = CompileLog()
    log.add(REPORT)
    stored = Counter(counters)
    counters.clear()
    assert len(log.reports()) == 1
    counters.update(stored)
    assert [report.from_cache for report in log.reports()] == [False, True]


def test_a_reset_forgets_what_the_counters_say_too(counters: Counter[str]) -> None:
    log = CompileLog()
    log.add(REPORT)
    counters.update(Counter(counters))
    log.reset()
    assert log.reports() == ()


def test_a_plan_that_was_compiled_again_is_shown_once() -> None:
    cached = dataclasses.replace(REPORT, from_cache=True)
    assert one_for_each_plan([REPORT, OTHER, cached]) == (
        dataclasses.replace(cached, compiled=2),
        OTHER,
    )


def test_the_report_of_a_plan() -> None:
    def backward(x, y, z):
        gradients = [reduce(x, "a"), reduce(y, "b"), reduce(z, "c", module="ddp2")]
        return *gradients, all_reduce(y, "max", "elsewhere")

    module = trace(backward, [tensor(4), tensor(2, 3), tensor(4)])
    report = report_plan(plan_of(module.graph, 1000), "concat")
    assert (report.collectives_before, report.collectives_after) == (4, 3)
    first, second = report.buckets
    assert (first.module, first.group, first.parameters) == ("DDP0", "world", ("a", "b"))
    assert (first.num_bytes, first.dtype) == (40, "float32")
    assert (second.module, second.group, second.parameters) == ("DDP2", "pairs", ("c",))
    assert ["group 'elsewhere'" in item.reason for item in report.rejections] == [True]
    other_mode = report_plan(plan_of(module.graph, 1000), "coalesced")
    assert other_mode.digest != report.digest
