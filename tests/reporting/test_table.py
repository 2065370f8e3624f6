# ruff: noqa: E501  (a table is as wide as it is)
"""A report as text."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline

import fusion_passes
from fusion_passes import BucketReport, FusionReport, ModuleReport, RejectionReport, format_report
from fusion_passes.layout.caps import MIB
from fusion_passes.reporting.records import SentParameters
from fusion_passes.reporting.table import format_bytes
from fusion_passes.reporting.timeline import BucketTimes

LABEL = "DDP 0 (Net)"

REPORT = FusionReport(
    mode="concat",
    collectives_before=8,
    collectives_after=3,
    buckets=(
        BucketReport(
            module=LABEL,
            group="0",
            dtype="float32",
            num_bytes=1536,
            sent_bytes=768,
            scaling="result",
            parameters=("head.bias", "head.weight"),
            waited="at the end",
            overlapped=2,
            following=2,
        ),
        BucketReport(
            module=LABEL,
            group="0",
            dtype="bfloat16",
            num_bytes=30 * MIB,
            sent_bytes=30 * MIB,
            scaling="bucket",
            parameters=tuple(f"layers.{index}.weight" for index in range(5)),
            copied=(
                ("layers.0.weight", "a reason"),
                ("layers.1.weight", "another reason"),
                ("layers.3.weight", "a reason"),
            ),
            waited="early, because x reads it",
            overlapped=1,
            following=2,
        ),
    ),
    rejections=(
        RejectionReport("all_reduce_7 (_c10d_functional.all_reduce.default)", "its own reason"),
    ),
    digest="0123456789abcdef",
)

COPIED = tuple((f"layers.{number}", "one reason") for number in range(6))
FIRST = dataclasses.replace(
    REPORT.buckets[0], scaling="collective", waited="", name=f"{LABEL} bucket 0"
)
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
    decision=("caps x 2 is kept",),
    memory="registered with NCCL",
    buckets=(
        dataclasses.replace(FIRST, times=BucketTimes(0.010, 0.011, 0.012, 0.0)),
        dataclasses.replace(
            FIRST,
            parameters=tuple(name for name, _ in (*COPIED, ("table", ""))),
            scaling="rows",
            copied=(*COPIED, ("table", "another reason")),
            times=BucketTimes(0.014, 0.015, 0.019, 0.0015),
        ),
    ),
)


def test_a_graph() -> None:
    assert_expected_inline(
        format_report(REPORT),
        """\
ddp_fusion concat: 8 collectives traced, 3 launched a step (plan 0123456789abcdef)
bucket        size  what was done
     0     1.5 KiB  2 of DDP 0 (Net): head.bias, head.weight
                    float32 sent as 768 B, scaled after the wait, stored without a copy
                    waited for at the end
     1    30.0 MiB  5 of DDP 0 (Net): layers.0.weight, layers.1.weight, layers.2.weight,
                    layers.3.weight and 1 more
                    bfloat16, scaled in the bucket, 3 copied
                    waited for early, because x reads it
copied: 2: layers.0.weight, layers.3.weight: a reason
copied: 1: layers.1.weight: another reason
left alone: all_reduce_7 (_c10d_functional.all_reduce.default): its own reason""",
    )


def test_a_narrow_terminal_folds_what_was_done() -> None:
    text = format_report(REPORT, width=60)
    assert text.split() == format_report(REPORT).split()
    assert max(map(len, text.splitlines())) <= 60
    assert text.endswith("its own\n            reason"), "below where the sentence begins"


def test_a_graph_without_buckets_has_no_table() -> None:
    report = dataclasses.replace(REPORT, buckets=(), rejections=(), compiled=3)
    assert_expected_inline(
        format_report(report),
        """ddp_fusion concat: 8 collectives traced, 3 launched a step (plan 0123456789abcdef, compiled 3 times)""",
    )


def test_a_module_has_its_buckets_their_times_and_why_gradients_were_copied() -> None:
    assert_expected_inline(
        format_modules(MODULE),
        """\
DDP 0 (Net): 9 gradients in 2 buckets, 2 stored there by compiled backwards in the last step (concat, 2 ranks over gloo)
bucket        size          sent, ms  exposed  what was done
     0     1.5 KiB      11.0 to 12.0      0.0  2: head.bias, head.weight
                                               float32 sent as 768 B, averaged by the collective, stored without a copy
     1     1.5 KiB      15.0 to 19.0      1.5  7: layers.0, layers.1, layers.2, layers.3 and 3 more
                                               float32 sent as 768 B, sparse: rows divided and summed, 7 copied
buckets: caps x 2 is kept
memory: registered with NCCL
copied: 6: layers.0, layers.1, layers.2, layers.3 and 2 more: one reason
copied: 1: table: another reason""",
    )


def test_a_module_before_its_first_step_and_one_with_a_hook() -> None:
    new = dataclasses.replace(MODULE, buckets=(), steps=0, group_size=1)
    assert_expected_inline(
        format_modules(new),
        """DDP 0 (Net): no averaged backward has ended yet, so it has no buckets (concat, 1 rank over gloo)""",
    )
    hooked = dataclasses.replace(MODULE, mode="hook", hook="powerSGD_hook")
    assert "(hook powerSGD_hook, 2 ranks over gloo)" in " ".join(format_modules(hooked).split())


def test_parameters_of_a_sharded_optimizer_have_their_times() -> None:
    sent = SentParameters(30 * MIB, 0.188, 0.031)
    sharded = dataclasses.replace(MODULE, shard_optimizer=True, sent_parameters=sent)
    assert format_modules(sharded).splitlines()[-1] == (
        "parameters: owners sent 30.0 MiB after optimizer.step() in 188.0 ms; the host waited for "
        "31.0 ms of that"
    )


def format_modules(module: ModuleReport) -> str:
    """The lines of a module, without the first and the last lines of the report."""
    report = dataclasses.replace(
        fusion_passes.report(), modules=(module,), warnings=("look here",), advice="try this"
    )
    first, *lines, last = format_report(report, width=120).splitlines()
    assert (first, last) == ("warning: look here", "advice: try this")
    return "\n".join(lines)


def test_without_recorded_steps_there_are_no_times() -> None:
    untimed = dataclasses.replace(MODULE, buckets=(dataclasses.replace(FIRST, times=None),))
    text = format_modules(untimed)
    assert "sent, ms" not in text


def test_of_many_buckets_the_first_are_shown() -> None:
    many = dataclasses.replace(MODULE, buckets=MODULE.buckets[:1] * 43)
    text = format_modules(many)
    assert "and 3 more buckets, which the JSON lists" in text
    assert text.count(" to ") == 40


def test_where_no_backward_ran_that_is_all_there_is_to_say() -> None:
    nothing = dataclasses.replace(
        fusion_passes.report(), modules=(), graphs=(), backwards=(), warnings=("look here",)
    )
    assert format_report(nothing).splitlines() == [
        "warning: look here",
        "ddp_fusion: no backward of a DDP module has run under the flag in this process.",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1024.0 KiB"),
        (MIB, "1.0 MiB"),
        (1024 * MIB, "1.0 GiB"),
        (5000 * 1024 * MIB, "5000.0 GiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text
