"""What a collective costs by its size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.profile.tables import MIB, CostTable, Taken, table_sizes

costs = st.lists(st.floats(0, 10), min_size=1, max_size=6)


def test_costs_are_lines_between_sizes_and_never_fall() -> None:
    table = CostTable.of((100, 200, 400), (3e-9, 2e-9, 4e-9), 5e-9)
    assert [table.cost_ns(size) for size in (1, 100, 200, 300, 400, 800)] == [2, 2, 2, 3, 4, 8]
    assert table.cost_ns(300, 3) == 3 + 2 * 5


@given(costs, st.integers(0, 5000), st.integers(0, 5000))
def test_more_bytes_never_cost_less_and_pieces_are_the_table(seconds, one, other) -> None:
    table = CostTable.of([4**n for n in range(len(seconds))], seconds)
    small, large = sorted((one, other))
    assert table.cost_ns(small) <= table.cost_ns(large)
    (piece,) = [piece for piece in table.pieces() if piece.above < small <= piece.up_to]
    assert piece.cost_ns(small) == table.cost_ns(small)


@pytest.mark.parametrize(
    ("sizes", "times", "rule"),
    [
        ((), (), "one time for each size"),
        ((1, 2), (1,), "one time for each size"),
        ((2, 1), (1, 2), "must grow"),
        ((0, 1), (1, 2), "must grow"),
        ((1, 2), (2, 1), "must never fall"),
        ((1, 2), (-1, 1), "must never fall"),
    ],
)
def test_what_is_no_table_is_refused(sizes, times, rule) -> None:
    with pytest.raises(ValueError, match=rule):
        CostTable(sizes, times)


def test_a_fit_is_for_people() -> None:
    exact = CostTable((1000, 2000, 4000), (150_000, 200_000, 300_000)).fit()
    assert exact.alpha_us == pytest.approx(100)
    assert exact.gbytes_per_s == pytest.approx(0.02)
    assert exact.error == pytest.approx(0, abs=1e-9)
    assert str(exact) == "100 us + bytes / 0.02 GB/s (within 0%)"
    assert CostTable((1, 1000), (1, 10_000)).fit().alpha_us >= 0
    assert CostTable((1, 2), (0, 0)).fit().gbytes_per_s == math.inf


def test_sizes_end_before_the_whole() -> None:
    assert table_sizes(4096) == (1024, 2048)
    assert table_sizes(4096, 4) == (1024,)
    assert table_sizes(4097, 4) == (1024, 4096)


def test_what_is_taken_is_a_line_that_neither_begins_below_0_nor_falls() -> None:
    assert Taken.of((MIB, 3 * MIB), (0.002, 0.004)) == Taken(1_000_000, 1_000_000)
    assert Taken.of((MIB, 4 * MIB), (0.0, 0.004)) == Taken(0, 1_000_000), "as for the large one"
    assert Taken.of((MIB, 4 * MIB), (0.004, 0.002)) == Taken(2_000_000, 0)
    assert Taken.of((MIB, MIB), (0.003, 0.003)) == Taken(0, 3_000_000)
    assert Taken.of((MIB, 2 * MIB), (-1.0, -1.0)) == Taken()
    with pytest.raises(ValueError, match="must be at least 0, but are -1 and 2"):
        Taken(-1, 2)


def test_what_is_left_of_a_cost_never_falls() -> None:
    taken = Taken(10, 20)
    costs = CostTable((MIB, 2 * MIB, 3 * MIB, 4 * MIB), (5, 100, 110, 200), tensor_ns=3)
    # 30, 50, 70 and 90 are taken: of the first more than it costs, of the third as much more as
    # that costs more.
    assert taken.left(costs) == CostTable(costs.num_bytes, (0, 50, 50, 110), tensor_ns=3)
    assert Taken().left(costs) == costs
