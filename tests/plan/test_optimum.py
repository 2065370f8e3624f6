"""The buckets with which the last collective ends earliest, beside all buckets that there are."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_passes.plan.contended import best_runs_beside
from fusion_passes.plan.optimum import best_runs
from fusion_passes.plan.queue import Queue, Run, run_ends
from fusion_passes.profile.tables import MIB, CostTable, Taken


def is_allowed(queue: Queue, begin: int, end: int) -> bool:
    if end - begin == 1:
        return True
    first = begin == 0 and queue.first_cap_bytes is not None
    cap = queue.first_cap_bytes if first else queue.cap_bytes
    held = bool(queue.earliest) and begin < queue.earliest[end - 1]
    return not held and (cap is None or sum(queue.num_bytes[begin:end]) <= cap)


def brute_force(queue: Queue, tables: list[CostTable]) -> int:
    """The earliest end over all ways to cut the gradients into neighbours."""
    count = len(queue.num_bytes)
    ends = []
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        if all(is_allowed(queue, *edge) for edge in pairwise(edges)):
            end = 0
            for begin, stop in pairwise(edges):
                size = sum(queue.num_bytes[begin:stop])
                cost = min(table.cost_ns(size, stop - begin) for table in tables)
                end = max(end, queue.ready_ns[stop - 1]) + cost
            ends.append(end)
    return min(ends)


@st.composite
def tables(draw) -> CostTable:
    sizes = draw(st.sets(st.integers(1, 60), min_size=1, max_size=4))
    times = draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
    return CostTable(tuple(sorted(sizes)), tuple(sorted(times)), draw(st.integers(0, 5)))


@st.composite
def queues(draw) -> Queue:
    count = draw(st.integers(1, 8))
    many = {"min_size": count, "max_size": count}
    caps = st.none() | st.integers(1, 60)
    earliest = draw(st.lists(st.integers(0, count), **many))
    return Queue(
        ready_ns=tuple(sorted(draw(st.lists(st.integers(0, 100), **many)))),
        num_bytes=tuple(draw(st.lists(st.integers(0, 30), **many))),
        earliest=tuple(min(max(earliest[: i + 1]), i) for i in range(count))
        if draw(st.booleans())
        else (),
        cap_bytes=draw(caps),
        first_cap_bytes=draw(caps),
    )


@settings(max_examples=600, deadline=None)
@given(queues(), st.lists(tables(), min_size=1, max_size=2))
def test_no_buckets_end_earlier(queue: Queue, costs: list[CostTable]) -> None:
    best = best_runs(queue, costs)
    assert best.end_ns == brute_force(queue, costs)
    assert run_ends(queue, best.runs, costs)[-1] == best.end_ns
    edges = [run.begin for run in best.runs]
    assert edges == [0, *(run.end for run in best.runs)][:-1]
    assert best.runs[-1].end == len(queue.num_bytes)
    assert all(is_allowed(queue, run.begin, run.end) for run in best.runs)


def test_without_overlap_there_is_one_bucket_and_with_free_launches_one_a_gradient() -> None:
    latency_only = CostTable((1, 100), (100, 100))
    assert best_runs(Queue((0, 100, 200), (10, 10, 10)), [latency_only]).runs == (Run(0, 3),)
    by_size = CostTable((1, 100), (1, 100))
    best = best_runs(Queue((0, 100, 200), (10, 10, 10)), [by_size])
    assert best.end_ns == 210
    # The first two end in time together: as few launches as half of the time to spare allows.
    assert best.runs == (Run(0, 2), Run(2, 3))
    assert best_runs(Queue((), ()), [by_size]).runs == ()


def test_the_cheapest_kind_is_taken_for_each_bucket() -> None:
    flat = CostTable((10, 1000), (20, 2000))
    listed = CostTable((10, 1000), (10, 1500), tensor_ns=50)
    best = best_runs(Queue((0, 5000, 5000), (500, 1, 1)), [flat, listed])
    assert [(run.begin, run.end, run.table) for run in best.runs] == [(0, 1, 1), (1, 3, 0)]


def test_without_a_table_it_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the cost of a collective"):
        best_runs(Queue((0,), (1,)), [])


@pytest.mark.parametrize("latency", [0, 50_000])
@pytest.mark.parametrize("rise", [0, 400])
@pytest.mark.parametrize("taken", [Taken(), Taken(1_000, 300)])
def test_ten_thousand_gradients_take_seconds_at_most(latency: int, rise: int, taken: Taken) -> None:
    count = 10_000
    sizes = tuple(4096 if i % 3 else 1_000_000 for i in range(count))
    steps = [4**n for n in range(5, 17)]
    table = CostTable(tuple(steps), tuple(latency + size // 2 for size in steps), 10)
    queue = Queue(tuple(rise * i for i in range(count)), sizes)
    begin = time.process_time()
    best = best_runs_beside(queue, [table, table], taken)
    assert time.process_time() - begin < 5
    assert best.runs[-1].end == count


# --- Beside compute ----------------------------------------------------------------------------


def ends_beside(queue: Queue, costs: list[CostTable], taken: Taken) -> list[int]:
    """The ends of all ways to cut the gradients, where compute stands still for a part of each
    collective: by two clocks, of the wall and of the compute."""
    count, ends = len(queue.num_bytes), []
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        if not all(is_allowed(queue, *edge) for edge in pairwise(edges)):
            continue
        clock = computed = 0
        for begin, stop in pairwise(edges):
            idle = max(queue.ready_ns[stop - 1] - computed, 0)
            size = sum(queue.num_bytes[begin:stop])
            left = min(taken.left(table).cost_ns(size, stop - begin) for table in costs)
            clock += idle + left + taken.of_bytes(size)
            computed += idle + left
        ends.append(clock)
    return ends


whole = st.integers(0, 40)
a_mib = st.integers(0, 2 * MIB)


@settings(max_examples=400, deadline=None)
@given(queues(), st.lists(tables(), min_size=1, max_size=2), st.builds(Taken, whole, a_mib))
def test_no_buckets_end_earlier_where_they_take_compute(queue, costs, taken) -> None:
    best = best_runs_beside(queue, costs, taken)
    ends = ends_beside(queue, costs, taken)
    # What is taken is rounded down, for each bucket.
    assert min(ends) <= best.end_ns <= min(ends) + len(queue.num_bytes)
    assert run_ends(queue, best.runs, costs, taken)[-1] == best.end_ns
    assert [run.begin for run in best.runs] == [0, *(run.end for run in best.runs)][:-1]
    assert best.runs[-1].end == len(queue.num_bytes)
    assert all(is_allowed(queue, run.begin, run.end) for run in best.runs)


def test_what_takes_compute_is_sent_in_fewer_buckets() -> None:
    # Beside free compute, the first bucket should leave early; beside compute that stops meanwhile,
    # its latency only makes the rest later.
    queue = Queue((0, 100, 200, 300), (100, 100, 100, 100))
    costs = CostTable((100, 1000), (60, 150))
    assert len(best_runs_beside(queue, [costs], Taken()).runs) > 1
    assert best_runs_beside(queue, [costs], Taken(50, MIB // 10)).runs == (Run(0, 4),)


def test_of_thousands_of_gradients_nearly_the_best_buckets_are_found() -> None:
    """So many that not all numbers of buckets are tried: here the best ones are known."""
    count = 2_000
    queue = Queue((0,) * (count - 1) + (10**9,), (MIB,) * count)
    costs, taken = CostTable((MIB, 2 * MIB), (10**6, 2 * 10**6 - 10)), Taken(10**5, 10**5)
    best = best_runs_beside(queue, [costs], taken)
    assert best.end_ns < 1.01 * min(ends_of_equal(queue, costs, taken))


def ends_of_equal(queue: Queue, costs: CostTable, taken: Taken) -> list[int]:
    """The ends of buckets of one size each, all sizes that there are."""
    count = len(queue.num_bytes)
    return [
        run_ends(
            queue, [Run(i, min(i + size, count)) for i in range(0, count, size)], [costs], taken
        )[-1]
        for size in range(1, count + 1)
    ]
