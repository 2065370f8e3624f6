"""The report as tables in a terminal."""

from __future__ import annotations

import dataclasses
import io

import fusion_passes
from fusion_passes import BucketReport, FusionReport, ModuleReport, RejectionReport
from fusion_passes.explain.screen import console_for, show
from fusion_passes.reporting.document import graph_documents
from fusion_passes.reporting.records import BucketDocument
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


LABEL = "DDP 0 (Net)"
STORED = dataclasses.replace(PLAN, launched="", waited="", copied=())
COPIED = tuple((f"layers.{number}", "one reason") for number in range(6))
MODULE = ModuleReport(
    name=LABEL,
    group="0",
    group_size=2,
    backend="gloo",
    mode="concat",
    hook="",
    steps=3,
    gradients=9,
    stored=2,
    decision=("planned from profile abc",),
    memory="registered with NCCL",
    buckets=(
        BucketDocument(f"{LABEL} bucket 0", STORED, TIMES[f"{LABEL} bucket 0"], None),
        BucketDocument(
            f"{LABEL} bucket 1",
            dataclasses.replace(
                STORED,
                parameters=tuple(name for name, _ in (*COPIED, ("table", ""))),
                scaling="rows",
                copied=(*COPIED, ("table", "another reason")),
            ),
            TIMES[f"{LABEL} bucket 1"],
            None,
        ),
    ),
)


def shown_module(module: ModuleReport) -> str:
    file = io.StringIO()
    totals = fusion_passes.report()
    show(dataclasses.replace(totals, modules=(module,), graphs=(), backwards=()), console_for(file))
    return file.getvalue()


def test_a_module_has_its_buckets_and_why_gradients_were_copied() -> None:
    lines = shown_module(MODULE).splitlines()
    text = " ".join(" ".join(lines).split())
    assert (
        "DDP 0 (Net): 9 gradients in 2 buckets, 2 stored there by compiled backwards in the last "
        "step (concat, 2 ranks over gloo)" in text
    )
    assert text.count("float32 sent as 768 B, averaged by") == 1
    assert text.count("stored without a copy") == 1
    assert text.count("float32 sent as 768 B, sparse, rows") == 1
    assert "7 copied" in text
    assert "buckets: planned from profile abc" in lines
    assert "memory: registered with NCCL" in lines
    assert "copied: 6: layers.0, layers.1, layers.2, layers.3 and 2 more: one reason" in lines
    assert "copied: 1: table: another reason" in lines
    first, second = (line for line in lines if " to " in line)
    assert first.split()[-4:] == ["11.0", "to", "12.0", "0.0"]
    assert second.split()[-4:] == ["15.0", "to", "19.0", "1.5"]


def test_a_module_before_its_first_step_and_one_with_a_hook() -> None:
    new = dataclasses.replace(MODULE, buckets=(), steps=0, group_size=1)
    assert (
        "DDP 0 (Net): no averaged backward has ended, so it has no buckets "
        "(concat, 1 rank over gloo)" in " ".join(shown_module(new).split())
    )
    hooked = dataclasses.replace(MODULE, mode="hook", hook="powerSGD_hook")
    assert "(hook powerSGD_hook, 2 ranks" in " ".join(shown_module(hooked).split())


def shown(names: dict[str, tuple[str, ...]], times: dict[str, BucketTimes]) -> str:
    graphs = graph_documents([GRAPH], names, times, PREDICTED if times else {})
    report = dataclasses.replace(
        fusion_passes.report(),
        graphs=graphs,
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
    assert "copied: 1: head.weight: its reason" in text
    assert "launched after mm, its last gradient" in text
    assert "buckets: chosen from profile abc" in text
    assert "predicted: by magic" in text
    assert "left alone: all_reduce_7: not DDP's" in text
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
        fusion_passes.report(), modules=(), graphs=(), backwards=(), warnings=("look here",)
    )
    show(nothing, console_for(file))
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "warning look here",
        "ddp_fusion: no backward of a DDP module has run under the flag in this process.",
    ]


def test_a_graph_that_launches_a_modules_bucket_has_its_name_whatever_the_order() -> None:
    names = {
        "DDP 0 (Net) bucket 0": ("head.weight", "head.bias"),
        "DDP 0 (Other) bucket 1": ("body",),
    }
    (graph,) = graph_documents([GRAPH], names, {})
    assert [bucket.name for bucket in graph.buckets] == ["DDP 0 (Net) bucket 0", ""]
