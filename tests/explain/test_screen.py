"""The report as tables in a terminal."""

from __future__ import annotations

import dataclasses
import io

import fusion_passes
from fusion_passes import BucketReport, FusionReport, RejectionReport, RowsReport
from fusion_passes.explain.screen import console_for, show
from fusion_passes.reporting.document import graph_documents, planned_times
from fusion_passes.reporting.timeline import BucketTimes

PLAN = BucketReport(
    module="DDP 0 (Net)",
    group="0",
    dtype="float32",
    num_bytes=1536,
    sent_bytes=768,
    cap_bytes=2**20,
    scaling="collective",
    parameters=("head.bias", "head.weight"),
    copied=(("head.weight", "its reason"),),
    launched="after mm, its last gradient",
    waited="at the end",
    predicted_start_s=0.001,
    predicted_end_s=0.003,
)
GRAPH = FusionReport(
    mode="auto",
    collectives_before=8,
    collectives_after=3,
    buckets=(
        PLAN,
        dataclasses.replace(
            PLAN,
            parameters=("body",),
            copied=(),
            predicted_start_s=0.005,
            predicted_end_s=0.009,
        ),
    ),
    rejections=(RejectionReport("all_reduce_7", "not DDP's"),),
    digest="0123456789abcdef",
    decision=("chosen from profile abc",),
)
NAMES = {"DDP 0 (Net) bucket 0": PLAN.parameters, "DDP 0 (Net) bucket 1": ("body",)}
PREDICTED = {
    "DDP 0 (Net) bucket 0": (0.011, 0.013),
    "DDP 0 (Net) bucket 1": (0.015, 0.019),
}
TIMES = {
    "DDP 0 (Net) bucket 0": BucketTimes(0.010, 0.011, 0.012, 0.018, 0.019, 0.0),
    "DDP 0 (Net) bucket 1": BucketTimes(0.014, 0.015, 0.019, 0.018, 0.019, 0.0015),
}


def shown(names: dict[str, tuple[str, ...]], times: dict[str, BucketTimes]) -> str:
    graphs = graph_documents([GRAPH], names, times, PREDICTED if times else {})
    report = dataclasses.replace(
        fusion_passes.report(),
        graphs=graphs,
        rows=(RowsReport("DDP 0 (Net) rows", "DDP 0 (Net)", "0", ("user.weight",)),),
        backwards=(),
        predicted_from="by magic",
        warnings=("look here",),
        advice="try this",
    )
    file = io.StringIO()
    show(report, console_for(file))
    return file.getvalue()


def test_each_bucket_has_its_plan_and_its_times() -> None:
    lines = shown(NAMES, TIMES).splitlines()
    text = " ".join(" ".join(lines).split())
    assert lines[0].split() == ["warning", "look", "here"], "first"
    assert lines[-1].split() == ["advice", "try", "this"], "last"
    assert "ddp_fusion auto: 8 collectives traced, 3 launched a step" in text
    assert "1 copied: its reason" in text
    assert "launched after mm, its last gradient" in text
    assert "buckets: chosen from profile abc" in text
    assert "predicted: by magic" in text
    assert "left alone: all_reduce_7: not DDP's" in text
    assert "DDP 0 (Net) rows: 1: user.weight; sparse gradients, gathered" in text
    first, second = (line for line in lines if " to " in line)
    assert first.split()[-7:] == ["11.0", "to", "12.0", "11.0", "to", "13.0", "0.0"]
    assert second.split()[-7:] == ["15.0", "to", "19.0", "15.0", "to", "19.0", "1.5"]


def test_without_recorded_steps_there_are_no_times() -> None:
    text = shown(NAMES, {})
    assert "sent, ms" not in text
    assert text.count("predicted") == 1, "the line below, and no column"


def test_where_no_backward_ran_that_is_all_there_is_to_say() -> None:
    file = io.StringIO()
    nothing = dataclasses.replace(
        fusion_passes.report(), graphs=(), backwards=(), warnings=("look here",)
    )
    show(nothing, console_for(file))
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "warning look here",
        "ddp_fusion: no backward of a DDP module has run under the flag in this process.",
    ]


def test_planned_times_have_the_names_of_buckets_that_ran() -> None:
    assert planned_times(graph_documents([GRAPH], NAMES, {})) == (
        {"DDP 0 (Net) bucket 0": (0.001, 0.003), "DDP 0 (Net) bucket 1": (0.005, 0.009)},
    )
    assert planned_times(graph_documents([GRAPH], {}, {})) == ()
    unplanned = dataclasses.replace(PLAN, predicted_start_s=None, predicted_end_s=None)
    graph = dataclasses.replace(GRAPH, buckets=(unplanned,))
    assert planned_times(graph_documents([graph], NAMES, {})) == ()
