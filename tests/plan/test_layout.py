"""Where the gradients of a bucket lie in its buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.plan.layout import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, lay_out


def offsets(numels: list[int], itemsize: int = 4) -> list[int]:
    return [place.offset for place in lay_out(numels, [(1,)] * len(numels), itemsize)]


def test_in_the_order_given_where_all_are_round() -> None:
    assert offsets([32, 64, 16]) == [0, 32, 96]


def test_the_odd_ones_come_last() -> None:
    assert offsets([3, 32, 6, 5, 16, 4]) == [58, 0, 52, 61, 32, 48]


def test_scalars_and_nothing() -> None:
    assert offsets([]) == []
    assert offsets([1, 0, 1]) == [0, 0, 1]


def test_small_elements_are_aligned_to_as_many_bytes() -> None:
    """16 elements of two bytes are half a cache line: they lie behind 32."""
    assert offsets([16, 32], itemsize=4) == [0, 16]
    assert offsets([16, 32], itemsize=2) == [32, 0]


def test_strides_are_kept() -> None:
    places = lay_out([6, 4], [(1, 2), (1,)], 4)
    assert [place.strides for place in places] == [(1, 2), (1,)]


@given(st.lists(st.integers(0, 300), max_size=20), st.sampled_from([1, 2, 4, 8]))
def test_places_cover_the_buffer_and_are_as_aligned_as_their_size(
    numels: list[int], itemsize: int
) -> None:
    places = sorted(zip(offsets(numels, itemsize), numels, strict=True))
    end = 0
    for offset, numel in places:
        assert offset == end
        end += numel
    limit = max(ALIGNMENT_BYTES // itemsize, ALIGNMENT_ELEMENTS)
    for offset, numel in places:
        if numel:
            assert offset % min(limit, numel & -numel) == 0
