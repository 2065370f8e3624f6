"""The reports that a process keeps of its graphs."""

from __future__ import annotations

import dataclasses

from fusion_passes.reporting.graphs import CompileLog, one_for_each_plan
from tests.reporting.test_table import REPORT

OTHER = dataclasses.replace(REPORT, digest="fedcba9876543210", mode="coalesced")
NOTHING_COPIED = dataclasses.replace(
    REPORT, buckets=tuple(dataclasses.replace(bucket, copied=()) for bucket in REPORT.buckets)
)


def test_a_report_is_complete_when_its_graph_is_lowered() -> None:
    log = CompileLog()
    log.expect(NOTHING_COPIED, "plan", [0, 1])
    log.packed("plan:1", {0: "a reason", 3: "a reason", 1: "another reason"})
    assert log.reports() == ()
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


def test_a_plan_that_was_compiled_again_is_shown_once() -> None:
    assert one_for_each_plan([NOTHING_COPIED, OTHER, REPORT]) == (
        dataclasses.replace(REPORT, compiled=2),
        OTHER,
    )
