# ruff: noqa: E501  (the first line of a report is as long as it is)
"""A report as text for a terminal."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline

from fusion_passes import BucketReport, FusionReport, RejectionReport, format_report
from fusion_passes.profile.tables import MIB
from fusion_passes.reporting.table import format_bytes

REPORT = FusionReport(
    mode="concat",
    collectives_before=8,
    collectives_after=3,
    buckets=(
        BucketReport(
            module="DDP 0 (Net)",
            group="0",
            dtype="float32",
            num_bytes=1536,
            sent_bytes=768,
            cap_bytes=0,
            scaling="result",
            parameters=("head.bias", "head.weight"),
            waited="at the end",
            overlapped=2,
            following=2,
        ),
        BucketReport(
            module="DDP 0 (Net)",
            group="0",
            dtype="bfloat16",
            num_bytes=30 * MIB,
            sent_bytes=30 * MIB,
            cap_bytes=0,
            scaling="bucket",
            parameters=tuple(f"layers.{index}.weight" for index in range(5)),
            copied=(
                ("layers.0.weight", "a reason"),
                ("layers.1.weight", "another reason"),
                ("layers.3.weight", "a reason"),
            ),
            note="what the backend does",
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


def test_the_table() -> None:
    assert_expected_inline(
        format_report(REPORT),
        """\
ddp_fusion concat: 8 collectives traced, 3 launched a step (compiled here, plan 0123456789abcdef)
bucket       size  gradients  what
     0    1.5 KiB          2  float32 sent as 768 B, scaled after the wait, DDP 0 (Net), group 0:
                              head.bias, head.weight
     1   30.0 MiB          5  bfloat16, scaled in the bucket, DDP 0 (Net), group 0: layers.0.weight,
                              layers.1.weight, layers.2.weight, layers.3.weight, layers.4.weight
                              copied: layers.0.weight, layers.3.weight: a reason
                              copied: layers.1.weight: another reason
                              waited for early, because x reads it
                              what the backend does
left alone: all_reduce_7 (_c10d_functional.all_reduce.default): its own reason""",
    )


def test_a_narrow_terminal_folds_the_names() -> None:
    text = format_report(REPORT, width=72)
    assert_expected_inline(
        text,
        """\
ddp_fusion concat: 8 collectives traced, 3 launched a step (compiled here, plan 0123456789abcdef)
bucket       size  gradients  what
     0    1.5 KiB          2  float32 sent as 768 B, scaled after the
                              wait, DDP 0 (Net), group 0: head.bias,
                              head.weight
     1   30.0 MiB          5  bfloat16, scaled in the bucket, DDP 0
                              (Net), group 0: layers.0.weight,
                              layers.1.weight, layers.2.weight,
                              layers.3.weight, layers.4.weight
                              copied: layers.0.weight, layers.3.weight:
                              a reason
                              copied: layers.1.weight: another reason
                              waited for early, because x reads it
                              what the backend does
left alone: all_reduce_7 (_c10d_functional.all_reduce.default): its own
            reason""",
    )
    assert max(len(line) for line in text.splitlines()[1:]) <= 72


def test_a_report_without_buckets_has_no_table() -> None:
    report = dataclasses.replace(REPORT, buckets=(), rejections=(), from_cache=True)
    assert_expected_inline(
        format_report(report),
        """ddp_fusion concat: 8 collectives traced, 3 launched a step (from the FX graph cache, plan 0123456789abcdef)""",
    )


def test_no_name_is_lost_in_any_width() -> None:
    names = [name for bucket in REPORT.buckets for name in bucket.parameters]
    for width in (1, 40, 80, 1000):
        assert all(name in format_report(REPORT, width=width) for name in names)


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
