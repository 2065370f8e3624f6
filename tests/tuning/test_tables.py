"""What a collective costs by its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.layout.caps import MIB
from fusion_passes.tuning.tables import CostTable

costs = st.lists(st.floats(0, 10), min_size=1, max_size=6)


def test_costs_are_lines_between_sizes_and_never_fall() -> None:
    table = CostTable.of((100, 200, 400), (3e-9, 2e-9, 4e-9))
    sizes = (0, 1, 100, 200, 300, 400, 800)
    assert [table.cost_ns(size) for size in sizes] == [2, 2, 2, 2, 3, 4, 8]


@given(costs, st.integers(0, 5000), st.integers(0, 5000))
def test_more_bytes_never_cost_less(seconds, one, other) -> None:
    table = CostTable.of([4**n for n in range(len(seconds))], seconds)
    small, large = sorted((one, other))
    assert table.cost_ns(small) <= table.cost_ns(large)


def test_sizes_that_nobody_has_measured_cost_what_a_line_says_to_a_nanosecond() -> None:
    """Though the product of a size and a time has more than 64 bits."""
    table = CostTable((1024, 64 * MIB), (10**6, 3 * 10**9 + 1))
    rise, run = 3 * 10**9 + 1 - 10**6, 64 * MIB - 1024
    assert table.cost_ns(50 * MIB) == 10**6 + rise * (50 * MIB - 1024) // run
    size = 40 * 2**30
    assert table.cost_ns(size) == (3 * 10**9 + 1) * size // (64 * MIB)


@pytest.mark.parametrize(
    ("sizes", "times", "rule"),
    [
        ((), (), "have . times"),
        ((1, 2), (1,), "have . times"),
        ((2, 1), (1, 2), "do not grow"),
        ((0, 1), (1, 2), "do not grow"),
        ((1, 2), (2, 1), "times fall"),
        ((1, 2), (-1, 1), "times fall"),
    ],
)
def test_what_is_no_table_is_refused(sizes, times, rule) -> None:
    with pytest.raises(ValueError, match=rule):
        CostTable(sizes, times)
