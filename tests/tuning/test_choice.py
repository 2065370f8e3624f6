"""The layouts that are compared, and which one is kept by measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.layout.caps import MIB, BucketCaps, default_caps, given_caps
from fusion_passes.layout.layout import GradientKind, Layout, plan_layout
from fusion_passes.tuning.choice import (
    AFTER_LAP,
    DEFAULT,
    FINALISTS,
    LEAST_LAPS,
    MOST_STEPS,
    TURN,
    Contest,
    candidates,
    piece_caps,
)

CPU = torch.device("cpu")
CAPS = default_caps(32 * MIB, MIB, 25 * MIB)

# --- Layouts -------------------------------------------------------------------------------------


def kinds_of(*mib: float, **changes: object) -> Any:
    sizes = [int(size * MIB) // 4 for size in mib]
    return {
        number: GradientKind(size, torch.float32, CPU, **changes)  # type: ignore[arg-type]
        for number, size in enumerate(sizes)
    }


def pieces_of(kinds: Any) -> Any:
    """One piece for each gradient, the last one first."""
    return [(number,) for number in reversed(kinds)]


def sizes(layout: Layout) -> list[float]:
    """MiB of each bucket."""
    return [bucket.numel * bucket.dtype.itemsize / MIB for bucket in layout.buckets]


HALVES = kinds_of(*[0.5] * 64)


def test_layouts_differ_by_factors_of_two_and_at_both_ends() -> None:
    found = candidates(pieces_of(HALVES), HALVES, CAPS)
    assert {name: sizes(layout) for name, layout in found.items()} == {
        "default": [1, *[4] * 7, 3],
        "caps x 0.25": [1] * 32,
        "caps x 0.5": [1, *[2] * 15, 1],
        "caps x 2": [1, *[8] * 3, 7],
        "caps x 4": [1, 16, 15],
        "smaller first bucket": [0.5, *[4] * 7, 3.5],
        "smaller last bucket": [3, *[4] * 7, 1],
    }
    assert found["default"] == plan_layout(pieces_of(HALVES), HALVES, CAPS), "as of 'concat'"


def test_gradients_come_in_one_order_in_all_layouts() -> None:
    for layout in candidates(pieces_of(HALVES), HALVES, CAPS).values():
        assert [n for bucket in layout.buckets for n in sorted(bucket.numbers)[::-1]] == [
            *reversed(range(64))
        ]


def test_caps_that_the_user_has_set_are_not_exceeded() -> None:
    found = candidates(pieces_of(HALVES), HALVES, given_caps(4 * MIB))
    assert max(max(sizes(layout)) for layout in found.values()) == 4
    assert "caps x 2" not in found
    listed = candidates(pieces_of(HALVES), HALVES, given_caps(4 * MIB, [2 * MIB, 4 * MIB]))
    assert sizes(listed["caps x 0.5"])[:3] == [1, 2, 2]
    assert "smaller first bucket" not in listed
    assert max(sizes(listed["smaller last bucket"])) == 2


def test_equal_layouts_are_compared_once() -> None:
    two = kinds_of(0.5, 0.5)
    assert list(candidates(pieces_of(two), two, CAPS)) == ["default", "smaller first bucket"]
    one = kinds_of(30)
    assert list(candidates(pieces_of(one), one, CAPS)) == ["default"]


def test_pieces_are_smaller_than_all_buckets() -> None:
    assert piece_caps(CAPS) == BucketCaps(MIB // 2, MIB // 2)
    assert piece_caps(given_caps(4 * MIB, [MIB, 4 * MIB])) == BucketCaps(MIB // 8, MIB // 8)
    assert piece_caps(given_caps(1)) == BucketCaps(1, 1)


KIND = st.builds(
    GradientKind,
    numel=st.integers(1, 4000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    device=st.just(CPU),
    is_sparse=st.booleans(),
    is_delayed=st.booleans(),
)


@given(st.lists(KIND, min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 20_000))
def test_every_layout_has_whole_pieces_of_one_kind(
    listed: list[GradientKind], length: int, cap: int
) -> None:
    kinds: Any = dict(enumerate(listed))
    numbers = list(kinds)
    pieces = [tuple(numbers[i : i + length]) for i in range(0, len(numbers), length)]
    whole = plan_layout(pieces, kinds, BucketCaps(0, 0)).buckets
    for layout in candidates(pieces, kinds, BucketCaps(cap, 2 * cap)).values():
        assert sorted(layout.places) == numbers
        for bucket in layout.buckets:
            of = {(kinds[n].dtype, kinds[n].is_sparse, kinds[n].is_delayed) for n in bucket.numbers}
            assert len(of) == 1
            assert len(bucket.numbers) == 1 or not bucket.is_sparse
        delayed = [kinds[bucket.numbers[0]].is_delayed for bucket in layout.buckets]
        assert delayed == sorted(delayed), "they are launched last"
        for piece in whole:
            index, start = layout.places[piece.numbers[0]]
            for number, offset in zip(piece.numbers, piece.offsets, strict=True):
                assert layout.places[number] == (index, start + offset)


# --- The choice ----------------------------------------------------------------------------------


def compared(seconds: Callable[[int, int], float], count: int = 7) -> Contest:
    """A comparison in which a layout takes so many seconds in a lap."""
    contest = Contest(count)
    others = list(range(1, count))
    steps = 0
    while others:
        lap = len(contest.laps)
        contest.laps.append({index: seconds(index, lap) for index in (DEFAULT, *others)})
        steps += TURN * (1 + len(others)) + AFTER_LAP
        assert steps <= MOST_STEPS
        others = contest.next_lap()
    return contest


def table(*rows: Sequence[float]) -> Callable[[int, int], float]:
    """Seconds by layout and lap; the last of a row goes on."""
    return lambda index, lap: rows[index][min(lap, len(rows[index]) - 1)]


@pytest.mark.parametrize(
    ("rows", "choice"),
    [
        pytest.param([[1.0], [0.9], [1.1]], 1, id="faster in each lap"),
        pytest.param([[1.0], [1.0], [1.0]], 0, id="no difference"),
        pytest.param([[1.0], [0.975]], 1, id="a gain"),
        pytest.param([[1.0], [0.985]], 0, id="too small a gain"),
        pytest.param(
            [[1.0], [0.8, 0.8, 1.1, 0.9, 0.9, 1.2, 1.1, 0.9, 0.9, 1.1]], 0, id="within the spread"
        ),
        pytest.param(
            [[2.0, 1.0, 3.0, 1.5], [1.8, 0.9, 2.7, 1.35]], 1, id="while the machine drifts"
        ),
        pytest.param([[1.0], [0.5, 1.2]], 0, id="faster once"),
        pytest.param([[1.0], [0.9], [0.8], [0.95]], 2, id="the fastest of several"),
    ],
)
def test_a_layout_is_kept_if_it_beats_the_default_beyond_the_spread(
    rows: list[list[float]], choice: int
) -> None:
    assert compared(table(*rows), len(rows)).choice == choice


def test_one_that_is_ahead_in_every_lap_ends_the_comparison() -> None:
    ahead = compared(table([1.0], [0.9], [0.95]), 3)
    assert len(ahead.laps) == LEAST_LAPS
    takes_turns = compared(table([1.0], [0.9, 0.95], [0.95, 0.9, 0.95, 0.9, 0.95, 0.9, 0.95]), 3)
    assert len(takes_turns.laps) > LEAST_LAPS


def test_slow_ones_are_left_out_and_the_default_never() -> None:
    contest = compared(lambda index, _: 1.0 + 0.01 * (index - 4) if index else 1.0, 7)
    first, second, third = contest.laps
    assert list(first) == [0, 1, 2, 3, 4, 5, 6]
    assert sorted(second) == [0, 1, 2, 3]
    assert len(second) == 1 + FINALISTS
    assert list(second)[1:] == list(third)[:0:-1], "in the other direction"
    slower = compared(lambda index, _: 1.0 + 0.01 * index, 7)
    assert len(slower.laps) == 2, "nothing is left to compare"
    assert slower.choice == DEFAULT


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8), min_size=2, max_size=7))
def test_no_times_take_more_steps_or_a_slower_layout(rows: list[list[float]]) -> None:
    contest = compared(table(*rows), len(rows))
    if contest.choice:
        assert statistics.median(contest.ratios(contest.choice)) < 1
