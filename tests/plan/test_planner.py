# ruff: noqa: E501  (a golden has one line for each node)
"""Which reductions share a bucket, and where a bucket ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.plan.buckets import BucketPlan
from fusion_passes.plan.caps import BucketCaps
from fusion_passes.plan.planner import CapsOf, PlanOptions
from testing.graphs import (
    Backward,
    TensorSpec,
    assert_same_numbers,
    assert_topological,
    caps,
    cast,
    coalesced,
    concat,
    execute,
    plan_of,
    reduce,
    reduce_as,
    tensor,
    trace,
)


def _plan(function: Backward, *inputs: TensorSpec, caps_of: CapsOf | None = None) -> BucketPlan:
    return plan_of(trace(function, inputs).graph, caps_of)


def _of_sizes(*sizes: int, caps_of: CapsOf) -> list[list[str]]:
    """Buckets, as parameter names, of fp32 gradients with these numbers of bytes."""

    def backward(*inputs):
        return [reduce(value, str(index)) for index, value in enumerate(inputs)]

    plan = _plan(backward, *(tensor(size // 4) for size in sizes), caps_of=caps_of)
    return _names(plan)


def _names(plan: BucketPlan) -> list[list[str]]:
    return [[member.owner.parameter for member in bucket.members] for bucket in plan.buckets]


def test_a_plan_says_what_it_does() -> None:
    def backward(x, y, z):
        other = all_reduce(torch.div(z, 2), "sum", "world")
        return reduce(x, "a"), reduce(y, "b"), other

    plan = _plan(backward, tensor(4), tensor(2, 3), tensor(4), caps_of=caps(1000))
    assert_expected_inline(
        plan.describe().replace(": group", ":\ngroup"),
        """\
bucket 0: 2 gradients, 40 bytes, cap 1000, sum(gradient / 2) float32 cpu on ddp0, scaled: store: a, b
left alone: all_reduce (_c10d_functional.all_reduce.default):
group 'world' belongs to no DistributedDataParallel module that was constructed under ddp_fusion""",
    )
    assert plan.buckets[0].num_bytes == plan.buckets[0].sent_bytes == 40


def test_one_bucket_for_each_key_in_the_order_of_their_launches() -> None:
    def backward(x, y):
        return (
            reduce(x, "a"),
            reduce(y, "b", module="ddp1"),
            reduce(x, "c"),
            reduce(y, "d", divide=4),
            reduce(y, "e", module="ddp1"),
            reduce(cast(x, torch.float64), "f"),
        )

    assert _names(_plan(backward, tensor(4), tensor(4))) == [["a", "c"], ["d"], ["b", "e"], ["f"]]


# --- Caps: a bucket is closed by the reduction that brings it there ----------------------------


@pytest.mark.parametrize(
    ("cap_bytes", "buckets"),
    [
        (31, [["0", "1"], ["2", "3"]]),
        (32, [["0", "1"], ["2", "3"]]),
        (33, [["0", "1", "2"], ["3"]]),
    ],
)
def test_both_sides_of_the_cap(cap_bytes: int, buckets: list[list[str]]) -> None:
    assert _of_sizes(16, 16, 16, 16, caps_of=caps(cap_bytes)) == buckets


@pytest.mark.parametrize(
    ("first_bytes", "buckets"),
    [
        (15, [["0"], ["1", "2"], ["3"]]),
        (16, [["0"], ["1", "2"], ["3"]]),
        (17, [["0", "1"], ["2", "3"]]),
    ],
)
def test_both_sides_of_the_first_cap(first_bytes: int, buckets: list[list[str]]) -> None:
    assert _of_sizes(16, 16, 16, 16, caps_of=caps(32, first=first_bytes)) == buckets


@pytest.mark.parametrize(
    ("hold_bytes", "buckets"),
    [
        (47, [["a"], ["x", "y"], ["b"]]),
        (48, [["a"], ["x", "y"], ["b"]]),
        (49, [["x", "y"], ["a", "b"]]),
    ],
)
def test_both_sides_of_the_hold(hold_bytes: int, buckets: list[list[str]]) -> None:
    """16 bytes of ``a`` itself and 32 of another key become ready before ``b`` does."""

    def backward(x, wide):
        return (
            reduce(x, "a"),
            reduce(wide, "x", module="ddp1"),
            reduce(wide, "y", module="ddp1"),
            reduce(x, "b"),
        )

    def caps_of(group_name: str) -> BucketCaps:
        return BucketCaps(1000, 1000, hold_bytes if group_name == "ddp0" else 1000)

    assert _names(_plan(backward, tensor(4), tensor(4), caps_of=caps_of)) == buckets


def test_a_large_gradient_closes_its_bucket_and_may_exceed_the_cap() -> None:
    assert _of_sizes(16, 400, 16, caps_of=caps(100)) == [["0", "1"], ["2"]]


def test_each_module_has_its_own_caps_and_its_own_first_bucket() -> None:
    def backward(x):
        names = ["a", "b", "c", "d"]
        return [reduce(x, name, module=module) for name in names for module in ("ddp0", "ddp1")]

    limits = {"ddp0": BucketCaps(16, 48, 1000), "ddp1": BucketCaps(32, 32, 1000)}
    plan = _plan(backward, tensor(4), caps_of=limits.__getitem__)
    assert [
        (bucket.key.group_name, bucket.cap_bytes, len(bucket.members)) for bucket in plan.buckets
    ] == [
        ("ddp0", 16, 1),
        ("ddp1", 32, 2),
        ("ddp0", 48, 3),
        ("ddp1", 32, 2),
    ]


def test_empty_gradients_neither_close_nor_open_more() -> None:
    assert _of_sizes(16, 0, 0, 16, 0, caps_of=caps(32)) == [["0", "1", "2", "3", "4"]]


# --- A full bucket takes along what is ready together with it -----------------------------------


@pytest.mark.parametrize(
    ("small", "buckets"),
    [
        ([8], [["weight", "0"], ["next"]]),
        ([4, 4, 4], [["weight", "0", "1", "2"], ["next"]]),
        ([16], [["weight"], ["0", "next"]]),
        ([8, 8], [["weight", "0"], ["1", "next"]]),
    ],
)
def test_both_sides_of_an_eighth_of_the_cap(small: list[int], buckets: list[list[str]]) -> None:
    """Two biases of 8 bytes would be an eighth of 128."""

    def backward(x, y, *biases):
        weight = reduce(torch.mm(x, y), "weight")
        others = [reduce(bias + 1, str(index)) for index, bias in enumerate(biases)]
        return weight, *others, reduce(torch.mm(y, x), "next")

    square = tensor(6, 6)
    inputs = [tensor(size // 4) for size in small]
    assert _names(_plan(backward, square, square, *inputs, caps_of=caps(128))) == buckets


def test_a_full_bucket_waits_for_no_library_kernel() -> None:
    def backward(x, y, bias):
        weight = reduce(torch.mm(x, y), "weight")
        late = torch.mm(y, x)
        return weight, reduce(bias + late[0], "bias"), reduce(late, "next")

    plan = _plan(backward, tensor(6, 6), tensor(6, 6), tensor(6), caps_of=caps(1000, first=128))
    assert _names(plan) == [["weight"], ["bias", "next"]]


def test_other_buckets_are_filled_while_a_full_one_waits() -> None:
    def backward(x, y, bias):
        return (
            reduce(torch.mm(x, y), "weight"),
            reduce(cast(bias, torch.float64), "wide"),
            reduce(bias, "bias"),
            reduce(torch.mm(y, x), "next"),
        )

    plan = _plan(backward, tensor(6, 6), tensor(6, 6), tensor(2), caps_of=caps(1000, first=128))
    assert _names(plan) == [["wide"], ["weight", "bias"], ["next"]]


def test_only_a_bucket_without_bytes_is_empty() -> None:
    (bucket,) = _plan(lambda x: reduce(x, "a"), tensor(4)).buckets
    assert not bucket.is_empty
    (bucket,) = _plan(lambda x, y: (reduce(x, "a"), reduce(y, "b")), tensor(0), tensor(0)).buckets
    assert bucket.is_empty


def test_reduce_dtype_is_for_wider_floating_point_gradients() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

    def backward(*inputs):
        return [reduce(x, str(index)) for index, x in enumerate(inputs)]

    module = trace(backward, [tensor(4, dtype=dtype) for dtype in dtypes])
    plan = plan_of(module.graph, options=PlanOptions(reduce_dtype=torch.bfloat16))
    sent = {bucket.key.dtype: bucket.key.reduce_dtype for bucket in plan.buckets}
    assert sent == {
        torch.float32: torch.bfloat16,
        torch.float64: torch.bfloat16,
        torch.bfloat16: torch.bfloat16,
        torch.float16: torch.float16,
        torch.complex64: torch.complex64,
    }
    sizes = {bucket.key.dtype: (bucket.num_bytes, bucket.sent_bytes) for bucket in plan.buckets}
    assert sizes[torch.float32] == (16, 8)
    assert sizes[torch.float64] == (32, 8)
    assert sizes[torch.bfloat16] == (8, 8)


def test_what_a_hook_has_cast_is_sent_as_it_is() -> None:
    module = trace(lambda x: reduce_as(x, "a", torch.float16), [tensor(4)])
    (bucket,) = plan_of(module.graph, options=PlanOptions(reduce_dtype=torch.bfloat16)).buckets
    assert bucket.key.reduce_dtype == torch.float16


def test_levels_part_buckets() -> None:
    def backward(x, y):
        first = reduce(x, "a")
        second = reduce(torch.neg(first), "b")
        return first, second, reduce(y, "c"), reduce(torch.abs(first), "d")

    assert _names(_plan(backward, tensor(4), tensor(4))) == [["a", "c"], ["b", "d"]]


# --- The digest --------------------------------------------------------------------------------


def _digest(*sizes: int, device: str = "cpu", names: str = "abc", **options: int) -> str:
    def backward(*inputs):
        return [reduce(value, name) for name, value in zip(names, inputs, strict=False)]

    inputs = [tensor(size, device=device) for size in sizes]
    return _plan(backward, *inputs, caps_of=caps(**options)).digest()


def test_the_digest_tells_plans_apart() -> None:
    plans = [
        _digest(4, 4),
        _digest(4, 8),
        _digest(4, 4, 4),
        _digest(4, 4, cap=16),
        _digest(4, 4, names="ba"),
        _digest(4, 4, device="cuda"),
    ]
    assert len(set(plans)) == len(plans)
    assert _digest(4, 4) == plans[0]
    assert len(plans[0]) == 16


def test_the_digest_is_equal_on_ranks_with_cards_of_their_own() -> None:
    assert _digest(4, 4, device="cuda:0") == _digest(4, 4, device="cuda:3")


def test_the_digest_is_equal_in_another_process() -> None:
    code = "from tests.plan.test_planner import _digest; print(_digest(4, 8, 16, cap=32))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1234"},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == _digest(4, 8, 16, cap=32)


# --- Properties --------------------------------------------------------------------------------

_GRADIENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 8]),  # elements
        st.sampled_from(["ddp0", "ddp1", "ddp2"]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([None, 0, 1, 2]),  # how many reductions back it needs a result
        st.sampled_from([None, "sum", "max"]),  # a collective of somebody else beside it
    ),
    max_size=7,
)
_CAPS = st.tuples(*[st.sampled_from([1, 16, 32, 1000])] * 3)


def _random_backward(gradients: list[tuple[Any, ...]]) -> Backward:
    def backward(*inputs):
        results: list[Any] = []
        others: list[Any] = []
        for index, (_, module, dtype, back, other) in enumerate(gradients):
            gradient = torch.neg(inputs[index])
            if back is not None and back < len(results):
                needed = cast(torch.sum(results[-1 - back]), dtype)
                gradient = torch.add(gradient, needed)
            if other is not None:
                gradient = all_reduce(gradient, other, "world")
                others.append(gradient)
            results.append(reduce(gradient, str(index), module=module))
        return [*results, *others]

    return backward


def _random_inputs(gradients: list[tuple[Any, ...]]) -> list[TensorSpec]:
    return [tensor(size, dtype=dtype) for size, _, dtype, _, _ in gradients]


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(_GRADIENTS, _CAPS)
def test_invariants_of_every_plan(
    gradients: list[tuple[Any, ...]], limits: tuple[int, int, int]
) -> None:
    caps_of = caps(*limits)
    plan = _plan(_random_backward(gradients), *_random_inputs(gradients), caps_of=caps_of)
    placed = [member for bucket in plan.buckets for member in bucket.members]
    assert sorted(int(member.owner.parameter) for member in placed) == list(range(len(gradients)))
    launches = [bucket.members[-1].position for bucket in plan.buckets]
    assert launches == sorted(launches)
    seen = set()
    for bucket in plan.buckets:
        assert all(member.key == bucket.key for member in bucket.members)
        positions = [member.position for member in bucket.members]
        assert positions == sorted(positions)
        assert bucket.num_bytes - bucket.members[-1].num_bytes < bucket.cap_bytes
        allowed = caps_of("")
        assert bucket.cap_bytes in (allowed.first_bytes, allowed.cap_bytes)
        seen.add(bucket.key)
    assert (
        plan.digest()
        == _plan(_random_backward(gradients), *_random_inputs(gradients), caps_of=caps_of).digest()
    )


@pytest.mark.parametrize("fuse", [concat, coalesced])
@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(gradients=_GRADIENTS, limits=_CAPS)
def test_every_plan_can_be_carried_out(fuse, gradients, limits) -> None:
    """No bucket waits for itself, and the numbers stay what they were."""
    module = trace(_random_backward(gradients), _random_inputs(gradients))
    numbers = execute(module)
    fuse(caps(*limits))(module.graph)(module.graph)
    assert_topological(module.graph)
    assert_same_numbers(numbers, execute(module))
