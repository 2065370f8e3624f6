"""A report as a table for a terminal."""

from __future__ import annotations

import textwrap
from types import MappingProxyType
from typing import Final

from fusion_passes.reporting.records import BucketReport, FusionReport

SCALED: Final = MappingProxyType(
    {
        "none": "not scaled",
        "rows": "sparse, rows divided and summed",
        "collective": "averaged by the collective",
        "hook": "given to its communication hook",
        "store": "scaled where stored",
        "bucket": "scaled in the bucket",
        "result": "scaled after the wait",
    }
)

FLATTENS: Final = (
    "Gloo copies the gradients into a buffer of its own, reduces that, and copies them back: "
    "mode 'concat' does without"
)
"""The note of a bucket whose gradients are sent as a list over Gloo."""


def format_report(report: FusionReport, *, width: int = 100) -> str:
    """The report as plain text.

    Args:
        report: what was done to one graph.
        width: columns of the terminal; longer lists of names are folded.
    """
    source = "from the FX graph cache" if report.from_cache else "compiled here"
    title = (
        f"ddp_fusion {report.mode}: {report.collectives_before} collectives traced, "
        f"{report.collectives_after} launched a step ({source}, plan {report.digest})"
    )
    lines = [title]
    if report.buckets:
        lines.append(f"{'bucket':>6}  {'size':>9}  {'gradients':>9}  what")
    for index, bucket in enumerate(report.buckets):
        size = format_bytes(bucket.num_bytes)
        head = f"{index:>6}  {size:>9}  {len(bucket.parameters):>9}  "
        lines += _hang(head, _contents(bucket), width)
        for reason, names in copies_by_reason(bucket).items():
            lines += _hang(" " * len(head), f"copied: {', '.join(names)}: {reason}", width)
        if bucket.overlapped < bucket.following:
            lines += _hang(" " * len(head), f"waited for {bucket.waited}", width)
        if bucket.note:
            lines += _hang(" " * len(head), bucket.note, width)
    for rejection in report.rejections:
        lines += _hang("left alone: ", f"{rejection.collective}: {rejection.reason}", width)
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """``512 B``, ``1.5 KiB``, ``25.0 MiB``, ``1.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} GiB"


def _contents(bucket: BucketReport) -> str:
    sent = ""
    if bucket.sent_bytes != bucket.num_bytes:
        sent = f" sent as {format_bytes(bucket.sent_bytes)}"
    where = f"{bucket.dtype}{sent}, {SCALED[bucket.scaling]}, {bucket.module}"
    return f"{where}, group {bucket.group}: {', '.join(bucket.parameters)}"


def copies_by_reason(*buckets: BucketReport) -> dict[str, list[str]]:
    """Names of the parameters whose gradients are copied, by the reason."""
    names: dict[str, list[str]] = {}
    for bucket in buckets:
        for name, reason in bucket.copied:
            names.setdefault(reason, []).append(name)
    return names


def _hang(head: str, text: str, width: int) -> list[str]:
    room = max(width - len(head), 20)
    first, *rest = textwrap.wrap(text, room, break_long_words=False) or [""]
    return [head + first, *(" " * len(head) + line for line in rest)]
