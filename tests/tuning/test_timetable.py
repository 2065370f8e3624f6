"""The buckets that measured ready times and costs give."""

from __future__ import annotations

import torch

from fusion_passes.layout.caps import KEPT_ON_CPU_BYTES, BucketCaps
from fusion_passes.layout.layout import GradientKind
from fusion_passes.tuning.records import ReadyTimes, parameters_key
from fusion_passes.tuning.tables import CostTable
from fusion_passes.tuning.timetable import Timetable, plan_timetable

FP32, BF16 = torch.float32, torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TABLE = CostTable((1000, 2000), (100, 200))
"""A byte takes a tenth of a nanosecond, beyond a latency of 100."""
CAPS = BucketCaps(4000, 4000)


def plan(
    ready: dict[int, int],
    bytes_of: dict[int, int] | None = None,
    caps: BucketCaps = CAPS,
    table: CostTable = TABLE,
    kinds: dict[int, GradientKind] | None = None,
) -> Timetable:
    """Of gradients of 1000 bytes, or as many as are given."""
    sizes = bytes_of or dict.fromkeys(ready, 1000)
    known = kinds or {n: GradientKind(sizes[n] // 4, FP32, CUDA) for n in sorted(ready)}
    numbers = sorted(ready, key=lambda n: ready[n])
    times = ReadyTimes(5, tuple(numbers), tuple(ready[n] for n in numbers), "now")
    return plan_timetable(times, known, FP32.itemsize, table, caps)


def test_gradients_that_come_slowly_are_sent_alone() -> None:
    table = CostTable((1000, 4000), (100, 400))
    planned = plan({0: 3000, 1: 2900, 2: 2800}, table=table)
    assert planned.buckets == ((2,), (1,), (0,))
    assert planned.sent_ns == {0: (2800, 2900), 1: (2900, 3000), 2: (3000, 3100)}
    assert (planned.compute_ns, planned.end_ns) == (3000, 3100)
    # One bucket of all begins with the last gradient.
    assert planned.fixed_end_ns == 3300


def test_gradients_that_come_together_share_a_collective() -> None:
    table = CostTable((1000, 4000), (1000, 1100))
    planned = plan({0: 12, 1: 11, 2: 10}, table=table)
    assert planned.buckets == ((2, 1, 0),)


def test_a_users_cap_bounds_buckets() -> None:
    capped = BucketCaps(2000, 2000, most_bytes=2000)
    table = CostTable((1000, 4000), (1000, 1100))
    planned = plan({0: 12, 1: 11, 2: 10}, caps=capped, table=table)
    assert sorted(map(len, planned.buckets)) == [1, 2]


def test_what_a_wider_dtype_is_sent_as_counts() -> None:
    """Sent as bf16, a bucket has twice the elements below the same cap."""
    kinds = {n: GradientKind(250, FP32, CUDA) for n in range(4)}
    times = ReadyTimes(5, (3, 2, 1, 0), (1, 1, 1, 1), "now")
    latency = CostTable((1000, 4000), (1000, 1000))
    capped = BucketCaps(2000, 2000, most_bytes=2000)
    planned = plan_timetable(times, kinds, BF16.itemsize, latency, capped)
    # The cap is of gradients as they are: two of 1000 bytes, whatever is sent of them.
    assert [len(bucket) for bucket in planned.buckets] == [2, 2]


def test_no_bucket_is_larger_than_memory_that_is_kept_on_a_cpu() -> None:
    size = KEPT_ON_CPU_BYTES // 8 * 4
    table = CostTable((1000, 10**9), (10**6, 10**6))
    kinds = {n: GradientKind(size // 4, FP32, CPU) for n in range(3)}
    planned = plan({0: 1, 1: 1, 2: 1}, kinds=kinds, table=table)
    assert sorted(map(len, planned.buckets)) == [1, 2]
    on_gpu = {n: GradientKind(size // 4, FP32, CUDA) for n in range(3)}
    assert len(plan({0: 1, 1: 1, 2: 1}, kinds=on_gpu, table=table).buckets) == 1


def test_no_bucket_is_larger_than_what_was_measured() -> None:
    table = CostTable((1000, 2000), (1000, 1000))
    assert sorted(map(len, plan({0: 1, 1: 1, 2: 1}, table=table).buckets)) == [1, 2]


def test_sparse_gradients_have_buckets_of_their_own_in_the_order_of_last_ones() -> None:
    kinds = {n: GradientKind(250, FP32, CUDA, is_sparse=n == 2) for n in range(4)}
    planned = plan({3: 10, 2: 5000, 1: 6000, 0: 7000}, kinds=kinds)
    assert planned.buckets == ((2,), (3, 1), (0,))
    assert planned.sent_ns == {1: (6000, 6200), 2: (7000, 7100)}


def test_gradients_without_a_time_come_last() -> None:
    kinds = {n: GradientKind(250, FP32, CUDA) for n in range(4)}
    times = ReadyTimes(5, (2, 1), (1000, 2000), "now")
    table = CostTable((1000, 4000), (1, 4))
    planned = plan_timetable(times, kinds, FP32.itemsize, table, CAPS)
    assert planned.buckets[0] == (2,)
    assert [n for bucket in planned.buckets for n in bucket] == [2, 1, 3, 0]


def test_modules_of_other_parameters_have_other_keys() -> None:
    first = (0, "weight", (2, 3), "float32")
    others = [(1, *first[1:]), (0, "bias", *first[2:]), (0, "weight", (3, 2), "float32")]
    keys = {parameters_key([item]) for item in (first, *others, (*first[:3], "bfloat16"))}
    assert len(keys) == 5
