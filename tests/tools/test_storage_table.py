"""The table of how gradients get into their buckets: what it divides by what."""

from __future__ import annotations

from typing import Any

import pytest

from benches.results import Origin
from benches.storage import COLUMNS, as_markdown, misses
from storage.code import Traffic, read_traffic
from workloads.ways import PLAIN, TRACED

ORIGIN = Origin("2026-01-01", "python tools/bench.py storage", "torch x", "machine")
Cells = dict[tuple[str, str], dict[str, Any]]


def cell(traffic: Traffic, peak: int, seconds: float, **copied: int) -> dict[str, Any]:
    return {
        "traffic": traffic,
        "copied": {name: ("something else reads it too", size) for name, size in copied.items()},
        "gradients": 1000,
        "peak": peak,
        "time": [seconds] * 3,
        "time over traced": [seconds / 1.02] * 3,
    }


def cells_of(ours: dict[str, Any]) -> Cells:
    """Compiled autograd alone takes a tenth more memory than a backward that is not traced."""
    return {
        ("GPT-2", PLAIN): cell(Traffic(0, 0, 100, 0, 10), 100, 1.0),
        ("GPT-2", TRACED): cell(Traffic(0, 0, 500, 0, 7), 110, 1.02),
        ("GPT-2", "concat"): ours,
    }


PIECE = """
def call(args):
    buf0 = torch.ops.fusion_passes.bucket.default([2, 0, 1], [0, 8, 12], 16, torch.float32, device)
    buf1 = buf0
    buf2 = reinterpret_tensor(buf1, (2, 4), (4, 1), 0)  # alias
    extern_kernels.mm(arg0_1, arg1_1, out=buf2)
    buf3 = torch.ops.aten.convolution_backward.default(arg2_1)
    buf4 = empty_strided_cpu((4, ), (1, ), torch.float32)
    buf5 = empty_strided_cpu((4, ), (1, ), torch.float32)
    torch.ops.fusion_passes.copy_in_.default(buf1, [buf4, buf5], [8, 12], [1, 1])
    torch.ops.fusion_passes.mark_ready_.default(buf1, [2, 0, 1])
"""


def test_what_is_stored_in_a_reducers_memory_is_counted() -> None:
    """64 bytes of which a product stores 32; what is copied is read and written."""
    assert read_traffic(PIECE) == Traffic(64, 32, 64, 1, 3)


def rows(cells: Cells) -> dict[str, list[str]]:
    lines = [
        line.split(" | ") for line in as_markdown(cells, ORIGIN).splitlines() if "GPT-2 |" in line
    ]
    return {line[1]: [value.strip(" |") for value in line[2:]] for line in lines}


def test_calls_and_copies_are_those_beyond_the_same_backward_without_ddp() -> None:
    cells = cells_of(cell(Traffic(1000, 990, 300, 2, 14), 110, 1.02))
    cells["GPT-2", "torch concat"] = cell(Traffic(1000, 990, 700, 2, 9), 110, 1.02)
    found = rows(cells)
    assert found["concat"][:3] == ["99.0%", "2.0", "0.20"]
    assert found["torch concat"][:3] == ["99.0%", "1.0", "0.20"]
    assert found[TRACED][:3] == ["", "", ""], "it has no bucket"
    assert PLAIN not in found, "everything is over it"


def test_peak_and_time_are_over_both_bases() -> None:
    found = rows(cells_of(cell(Traffic(1000, 1000, 100, 2, 10), 121, 1.02)))
    assert found["concat"][3:] == [
        "1.210",
        "1.020 (1.020 to 1.020)",
        "1.100",
        "1.000 (1.000 to 1.000)",
    ]
    assert found[TRACED][3] == "1.100"
    assert all(len(row) == len(COLUMNS) - 2 for row in found.values())


def test_a_copy_that_only_the_package_knows_of_counts() -> None:
    ours = cell(Traffic(1000, 1000, 100, 2, 10), 110, 1.02, bias=40)
    assert rows(cells_of(ours))["concat"][0] == "96.0%"


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (cell(Traffic(1000, 980, 100, 2, 12), 102, 1.5), []),
        (cell(Traffic(1000, 970, 100, 2, 12), 102, 1.0), ["stored 97.0%, not 98%"]),
        (cell(Traffic(1000, 980, 100, 2, 13), 102, 1.0), ["1.5 calls for each bucket, not 1"]),
        (cell(Traffic(1000, 980, 100, 2, 12), 103, 1.0), ["peak memory 1.030, not 1.02"]),
    ],
)
def test_what_is_counted_is_judged(ours: dict[str, Any], words: list[str]) -> None:
    expected = [f"missed: GPT-2, concat: {text}" for text in words]
    assert misses("GPT-2", "concat", cells_of(ours)) == expected


def test_torchs_ways_are_not_judged() -> None:
    cells = cells_of(cell(Traffic(1000, 0, 4000, 2, 30), 200, 2.0))
    cells["GPT-2", "torch concat"] = cells["GPT-2", "concat"]
    assert misses("GPT-2", "torch concat", cells) == []
