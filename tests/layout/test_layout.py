"""Where gradients lie in the buckets of a reducer."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import GradientKind, Layout, decode, encode, plan_layout

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


def kinds(*numels: int) -> Any:
    """Gradients with these numbers of elements."""
    return {number: GradientKind(numel, FP32, CPU) for number, numel in enumerate(numels)}


def plan(pieces: Any, known: Any, caps: BucketCaps) -> Layout:
    """:func:`plan_layout`, with literals for parameter numbers."""
    return plan_layout(pieces, known, caps)


def test_whole_pieces_fill_buckets_up_to_the_cap() -> None:
    layout = plan([(3,), (2, 1), (0,)], kinds(16, 16, 16, 16), BucketCaps(64, 128))
    assert [bucket.numbers for bucket in layout.buckets] == [(3,), (2, 1), (0,)]
    assert [bucket.offsets for bucket in layout.buckets] == [(0,), (0, 16), (0,)]


def test_a_bucket_one_byte_below_its_cap_stays_open() -> None:
    at, below = (
        plan([(1,), (0,)], kinds(16, 16), BucketCaps(cap, cap)) for cap in (16 * 4, 16 * 4 + 1)
    )
    assert [bucket.numbers for bucket in at.buckets] == [(1,), (0,)]
    assert [bucket.numbers for bucket in below.buckets] == [(1, 0)]


def test_what_is_behind_a_piece_of_an_odd_size_is_aligned() -> None:
    layout = plan([(0,), (1,)], kinds(5, 16), BucketCaps(1024, 1024))
    assert layout.places == {1: (0, 0), 0: (0, 16)}


def test_dtypes_and_sparse_gradients_have_buckets_of_their_own() -> None:
    known = {
        0: GradientKind(4, FP32, CPU),
        1: GradientKind(4, BF16, CPU),
        2: GradientKind(8, FP32, CPU, is_sparse=True),
        3: GradientKind(4, FP32, CPU),
    }
    layout = plan([(3,), (2,), (1,), (0,)], known, BucketCaps(1024, 1024))
    assert [bucket.numbers for bucket in layout.buckets] == [(2,), (3, 0), (1,)]
    assert [bucket.is_sparse for bucket in layout.buckets] == [True, False, False]


def test_delayed_gradients_are_launched_last() -> None:
    known = {
        0: GradientKind(4, FP32, CPU, is_delayed=True),
        1: GradientKind(4, FP32, CPU),
        2: GradientKind(8, FP32, CPU, is_sparse=True, is_delayed=True),
        3: GradientKind(4, FP32, CPU),
        4: GradientKind(4, FP32, CPU, is_delayed=True),
    }
    pieces = [(4,), (0, 3), (2,), (1,)]
    layout = plan(pieces, known, BucketCaps(1024, 1024))
    assert [bucket.numbers for bucket in layout.buckets] == [(3, 1), (2,), (4, 0)]
    at_cap = plan(pieces, known, BucketCaps(16, 16))
    assert [bucket.numbers for bucket in at_cap.buckets] == [(3,), (1,), (4,), (0,), (2,)]


@st.composite
def kinds_of_all_sorts(draw):
    kind = st.builds(
        GradientKind,
        st.integers(0, 70),
        st.sampled_from([FP32, BF16]),
        st.sampled_from([CPU, torch.device("meta")]),
        is_sparse=st.sampled_from([False, False, False, True]),
        is_delayed=st.booleans(),
    )
    return dict(enumerate(draw(st.lists(kind, min_size=1, max_size=12))))


@given(kinds_of_all_sorts(), st.data())
def test_no_bucket_mixes_gradients_that_cannot_be_sent_together(known, data) -> None:
    numbers = data.draw(st.permutations(list(known)))
    cuts = data.draw(st.sets(st.integers(0, len(numbers)))) | {0, len(numbers)}
    pieces = [tuple(numbers[a:b]) for a, b in itertools.pairwise(sorted(cuts))]
    layout = plan(pieces, known, BucketCaps(100, 200))
    assert sorted(n for bucket in layout.buckets for n in bucket.numbers) == sorted(known)
    for bucket in layout.buckets:
        kinds_there = [known[number] for number in bucket.numbers]
        assert len({(kind.dtype, kind.device, kind.is_delayed) for kind in kinds_there}) == 1
        assert (bucket.dtype, bucket.device) == (kinds_there[0].dtype, kinds_there[0].device)
        assert len(kinds_there) == 1 or not any(kind.is_sparse for kind in kinds_there)
        for piece in pieces:  # The order within a piece is kept.
            there = [number for number in piece if number in bucket.numbers]
            assert there == [number for number in bucket.numbers if number in piece]
    delayed = [known[bucket.numbers[0]].is_delayed for bucket in layout.buckets]
    assert delayed == sorted(delayed)


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=20))
    numbers = draw(st.permutations(range(len(sizes))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(sizes) - 1)))) | {0, len(sizes)})
    pieces = [tuple(numbers[a:b]) for a, b in itertools.pairwise(cuts)]
    return pieces, kinds(*sizes), BucketCaps(draw(st.integers(1, 200)), draw(st.integers(1, 400)))


@given(layouts())
def test_each_gradient_has_one_place_and_pieces_stay_whole(drawn) -> None:
    pieces, known, caps = drawn
    layout = plan(pieces, known, caps)
    placed = [number for bucket in layout.buckets for number in bucket.numbers]
    assert sorted(placed) == sorted(known)
    for bucket in layout.buckets:
        ends = [*bucket.offsets[1:], bucket.numel]
        for number, start, end in zip(bucket.numbers, bucket.offsets, ends, strict=True):
            assert end - start == known[number].numel
            assert layout.places[number] == (bucket.index, start)
    for piece in pieces:
        index, start = layout.places[piece[0]]
        for number in piece:
            assert layout.places[number] == (index, start)
            start += known[number].numel


@given(layouts())
def test_pieces_are_the_same_on_the_other_side_of_a_broadcast(drawn) -> None:
    pieces, known, _ = drawn
    numbers = encode(pieces)
    assert len(numbers) == 2 * len(known)
    assert decode(numbers) == pieces
