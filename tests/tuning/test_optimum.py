"""The buckets with which the last collective ends earliest, beside all buckets that there are."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_passes.layout.caps import MIB
from fusion_passes.tuning.optimum import Queue, best_cuts, times_of
from fusion_passes.tuning.tables import CostTable


def last_end(queue: Queue, cuts: list[int]) -> int:
    return max((end for _, end in times_of(queue, cuts)), default=0)


def is_allowed(queue: Queue, begin: int, end: int) -> bool:
    cap = queue.cap_bytes
    if begin == 0 and queue.first_cap_bytes is not None:
        cap = queue.first_cap_bytes
    return end - begin == 1 or sum(queue.num_bytes[begin:end]) <= cap


def ends(queue: Queue) -> list[int]:
    """The last ends of all ways to cut the gradients into neighbours."""
    count, found = len(queue.num_bytes), []
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        if not all(is_allowed(queue, *edge) for edge in pairwise(edges)):
            continue
        free = 0
        for begin, stop in pairwise(edges):
            size = sum(queue.num_bytes[begin:stop])
            free = max(free, queue.ready_ns[stop - 1]) + queue.costs.cost_ns(size)
        found.append(free)
    return found


@st.composite
def tables(draw) -> CostTable:
    sizes = draw(st.sets(st.integers(1, 60), min_size=1, max_size=4))
    times = draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
    return CostTable(tuple(sorted(sizes)), tuple(sorted(times)))


@st.composite
def queues(draw) -> Queue:
    count = draw(st.integers(1, 8))
    many = {"min_size": count, "max_size": count}
    caps = st.integers(1, 60)
    return Queue(
        ready_ns=tuple(sorted(draw(st.lists(st.integers(0, 100), **many)))),
        num_bytes=tuple(draw(st.lists(st.integers(0, 30), **many))),
        costs=draw(tables()),
        cap_bytes=draw(caps | st.just(1000)),
        first_cap_bytes=draw(st.none() | caps),
    )


def check(queue: Queue, cuts: list[int]) -> None:
    assert cuts[0] == 0
    assert cuts[-1] == len(queue.num_bytes)
    assert all(is_allowed(queue, *edge) for edge in pairwise(cuts))


@settings(max_examples=200, deadline=None)
@given(queues())
def test_no_buckets_end_earlier(queue: Queue) -> None:
    cuts = best_cuts(queue)
    check(queue, cuts)
    assert last_end(queue, cuts) == min(ends(queue))


def test_without_overlap_there_is_one_bucket_and_with_free_launches_one_a_gradient() -> None:
    latency_only = CostTable((1, 100), (100, 100))
    assert best_cuts(Queue((0, 100, 200), (10, 10, 10), latency_only)) == [0, 3]
    by_size = CostTable((1, 100), (1, 100))
    queue = Queue((0, 100, 200), (10, 10, 10), by_size)
    # The first two end in time together.
    assert best_cuts(queue) == [0, 2, 3]
    assert last_end(queue, [0, 2, 3]) == 210
    assert best_cuts(Queue((), (), by_size)) == [0]


@pytest.mark.parametrize("latency", [pytest.param(0, marks=pytest.mark.nightly), 50_000])
@pytest.mark.parametrize("rise", [pytest.param(0, marks=pytest.mark.nightly), 400])
def test_ten_thousand_gradients_take_seconds_at_most(latency: int, rise: int) -> None:
    count = 10_000
    sizes = tuple(4096 if i % 3 else 1_000_000 for i in range(count))
    steps = [4**n for n in range(5, 17)]
    table = CostTable(tuple(steps), tuple(latency + size // 2 for size in steps))
    queue = Queue(tuple(rise * i for i in range(count)), sizes, table)
    begin = time.process_time()
    cuts = best_cuts(queue)
    assert time.process_time() - begin < 5
    check(queue, cuts)
    # Where each cap is full with one or two, nothing is left to be chosen.
    small = replace(queue, cap_bytes=1_004_096)
    check(small, best_cuts(small))


def test_of_thousands_of_gradients_nearly_the_best_buckets_are_found() -> None:
    """So many that small neighbours stay together: here the best buckets are known."""
    count = 2_000
    costs = CostTable((MIB, 2 * MIB), (10**6, 2 * 10**6 - 10))
    queue = Queue((0,) * (count - 1) + (10**9,), (MIB,) * count, costs)
    of_equal = (last_end(queue, [*range(0, count, size), count]) for size in range(1, count + 1, 7))
    assert last_end(queue, best_cuts(queue)) < 1.01 * min(of_equal)


def test_a_cap_that_asks_for_more_buckets_than_are_tried() -> None:
    costs = CostTable((1024, 4096), (1, 4))
    assert best_cuts(Queue((0,) * 300, (4096,) * 300, costs, cap_bytes=1000)) == list(range(301))
