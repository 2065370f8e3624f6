"""Steps that were measured: their text, their files, and what of them is noise."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from fusion_passes.agreement.exchange import Meeting
from fusion_passes.profile import files
from fusion_passes.profile.agree import agree_on_steps
from fusion_passes.profile.steps import (
    MeasuredSteps,
    load_steps,
    module_key,
    slowest_ready,
    steps_path,
    store_steps,
)
from tests.profile.test_records import PLACE

MEASURED = MeasuredSteps(5, ((3, 2), (1,), (0,)), (100, 200, 400))


def test_what_was_measured_comes_back(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(files.DIRECTORY_VARIABLE, str(tmp_path))
    path = steps_path(PLACE, module_key([("a", (2, 3), "torch.float32")]))
    assert load_steps(path) is None
    for measured in (replace(MEASURED, serves=False), MEASURED):
        store_steps(path, measured)
        assert load_steps(path) == measured
    text = path.read_text()
    for broken in ("", "{}", text[:-9], text.replace('"format": 2', '"format": 1')):
        path.write_text(broken)
        assert load_steps(path) is None
        assert f"The measured steps {path} cannot be used" in caplog.text
    other = json.loads(text) | {"ready_ns": [100, 50, 400]}
    path.write_text(json.dumps(other))
    assert load_steps(path) is None
    assert "ready before the one before it" in caplog.text


def test_modules_of_other_parameters_have_other_files() -> None:
    keys = {
        module_key([("a", shape, dtype), *more])
        for shape in ((2, 3), (3, 2))
        for dtype in ("torch.float32", "torch.bfloat16")
        for more in ([], [("b", (), "torch.float32")])
    }
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("buckets", "ready", "same"),
    [
        (((3, 2), (1,), (0,)), (110, 190, 420), True),
        (((3, 2, 1, 0),), (400,), True),
        (((3,), (2,), (1,), (0,)), (60, 100, 150, 400), True),
        (((3, 2), (1,), (0,)), (200, 400, 800), True),
        (((3, 2), (1,), (0,)), (200, 400, 801), False),
        (((3, 2), (1,), (0,)), (50, 100, 200), True),
        (((3, 2), (1,), (0,)), (50, 100, 199), False),
        (((3, 2, 1, 0),), (199,), False),
        (((3, 2), (1,), (0,)), (201, 201, 400), False),
        (((3, 2), (1,), (0,)), (40, 49, 400), False),
        (((3, 2), (1,), (0, 4)), (100, 200, 400), False),
    ],
)
def test_noise_is_no_other_measurement(buckets, ready, same) -> None:
    assert MEASURED.agrees_with(MeasuredSteps(5, buckets, ready)) is same


def test_the_slowest_rank_counts_and_what_all_reduces_took_does_not() -> None:
    launched = [[10, 40, 100], [20, 30, 90]]
    assert slowest_ready(launched, [10, 10, 10], [0, 0, 0]) == (20, 40, 100)
    # Busy from 20 to 30, and from 40 to 50: half of that is taken.
    assert slowest_ready(launched, [10, 10, 10], [5, 5, 5]) == (20, 35, 90)
    # Busy all the time from 20 on: the second collective begins when the first ends, at 120.
    assert slowest_ready(launched, [100, 100, 100], [100, 100, 100]) == (20, 20, 20)
    # Of the first, a fifth and four fifths are over when the others come.
    assert slowest_ready(launched, [100, 10, 10], [10, 1, 0]) == (20, 38, 92)


# --- Between ranks -------------------------------------------------------------------------------


def meetings(count: int) -> list[Meeting]:
    store = dist.HashStore()
    return [Meeting(rank, count, timedelta(seconds=20), store, store) for rank in range(count)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([None, None, None], None),
        ([None, MEASURED, None], MEASURED),
        ([MEASURED, MeasuredSteps(1, ((0,),), (1,)), None], MEASURED),
    ],
)
def test_all_ranks_take_what_the_lowest_has_kept(found, expected) -> None:
    agreed: dict[int, MeasuredSteps | None] = {}

    def run(meeting: Meeting) -> None:
        agreed[meeting.rank] = agree_on_steps(meeting, found[meeting.rank], "key")

    threads = [threading.Thread(target=run, args=(meeting,)) for meeting in meetings(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert agreed == dict.fromkeys(range(3), expected)
