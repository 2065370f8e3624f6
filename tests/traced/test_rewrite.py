# ruff: noqa: E501  (a golden has one line a node)
"""Both ways of fusing: what the graph looks like then, which gradients share a bucket, which nodes
are left alone, and the order of the rest of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fusion_passes.graph.collectives import all_reduce
from tests.support.graphs import (
    Backward,
    RewriteFor,
    TensorSpec,
    cast,
    check,
    coalesced,
    concat,
    reduce,
    reduce_into,
    tensor,
)


def two_gradients(x, y):
    return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")


# --- "concat": one flat buffer, one scaling, one all-reduce ------------------------------------


def test_two_gradients_in_one_buffer() -> None:
    assert_expected_inline(
        check(two_gradients, [tensor(2, 3), tensor(4)], concat()),
        """\
x_1: f32[2, 3]
y_1: f32[4]
neg: f32[2, 3] = neg(x_1)
neg_1: f32[4] = neg(y_1)
pack_default: f32[10] = pack([neg, neg_1], [0, 6], [3, 1, 1], torch.float32, 1.0, False, 'plan:0')
all_reduce_default: f32[10] = all_reduce(pack_default, 'avg', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
as_strided_default: f32[2, 3] = as_strided(wait_tensor_default, [2, 3], [3, 1], 0)
as_strided_default_1: f32[4] = as_strided(wait_tensor_default, [4], [1], 6)
return (as_strided_default, as_strided_default_1)
""",
    )


def test_existing_grads() -> None:
    def backward(x, y, a, b):
        reduce_into(a, torch.neg(x), "a")
        reduce_into(b, torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3), tensor(4), tensor(2, 3), tensor(4)], concat()),
        """\
x_1: f32[2, 3]
y_1: f32[4]
a_1: f32[2, 3]
b_1: f32[4]
neg: f32[2, 3] = neg(x_1)
add: f32[2, 3] = add(a_1, neg)
neg_1: f32[4] = neg(y_1)
add_1: f32[4] = add(b_1, neg_1)
pack_default: f32[10] = pack([add, add_1], [0, 6], [3, 1, 1], torch.float32, 1.0, False, 'plan:0')
all_reduce_default: f32[10] = all_reduce(pack_default, 'avg', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
as_strided_default: f32[2, 3] = as_strided(wait_tensor_default, [2, 3], [3, 1], 0)
copy_: f32[2, 3] = copy_(a_1, as_strided_default)
as_strided_default_1: f32[4] = as_strided(wait_tensor_default, [4], [1], 6)
copy__1: f32[4] = copy_(b_1, as_strided_default_1)
return None
""",
    )


def test_a_bucket_is_sent_in_the_small_dtype() -> None:
    def backward(x, y):
        return reduce(cast(x, torch.float32), "a"), reduce(cast(y, torch.float32), "b")

    # Integers that bf16 can represent, so that nothing is rounded.
    small = tensor(4, dtype=torch.bfloat16)
    assert_expected_inline(
        check(backward, [small, small], concat(reduce_dtype=torch.bfloat16)),
        """\
x_1: bf16[4]
y_1: bf16[4]
pack_default: bf16[8] = pack([x_1, y_1], [0, 4], [1, 1], torch.bfloat16, 1.0, False, 'plan:0')
all_reduce_default: bf16[8] = all_reduce(pack_default, 'sum', 'ddp0')
wait_tensor_default: bf16[8] = wait_tensor(all_reduce_default)
widen_default: f32[8] = widen(wait_tensor_default, torch.float32, 2.0)
as_strided_default: f32[4] = as_strided(widen_default, [4], [1], 0)
as_strided_default_1: f32[4] = as_strided(widen_default, [4], [1], 4)
return (as_strided_default, as_strided_default_1)
""",
    )


def test_a_cast_from_another_dtype_or_with_another_reader_stays() -> None:
    def backward(x):
        return reduce(cast(torch.neg(x), torch.float32), "a")

    def other_reads_cast(x):
        wide = cast(torch.neg(x), torch.float32)
        return reduce(wide, "a"), torch.abs(wide)

    def other_reads_source(x):
        narrow = torch.neg(x)
        return reduce(cast(narrow, torch.float32), "a"), torch.abs(narrow)

    def packed(function: Backward, sent_as: torch.dtype) -> bool:
        """Whether the bucket holds the gradient as it is after the cast."""
        text = check(function, [tensor(4, dtype=torch.bfloat16)], concat(reduce_dtype=sent_as))
        return "pack([convert_element_type]" in text

    assert not packed(backward, torch.bfloat16)
    assert packed(backward, torch.float16)
    assert packed(other_reads_cast, torch.bfloat16)
    assert packed(other_reads_source, torch.bfloat16)


def test_scalars_and_empty_gradients_have_their_piece() -> None:
    def backward(x, y, z):
        return reduce(x, "scalar"), reduce(y, "empty"), reduce(z, "c")

    assert_expected_inline(
        check(backward, [tensor(), tensor(0, 4), tensor(4)], concat()),
        """\
x_1: f32[]
y_1: f32[0, 4]
z_1: f32[4]
pack_default: f32[5] = pack([x_1, z_1], [0, 1], [1], torch.float32, 1.0, False, 'plan:0')
all_reduce_default: f32[5] = all_reduce(pack_default, 'avg', 'ddp0')
wait_tensor_default: f32[5] = wait_tensor(all_reduce_default)
as_strided_default: f32[] = as_strided(wait_tensor_default, [], [], 0)
clone_default: f32[0, 4] = clone(y_1, memory_format=torch.contiguous_format)
as_strided_default_1: f32[4] = as_strided(wait_tensor_default, [4], [1], 1)
return (as_strided_default, clone_default, as_strided_default_1)
""",
    )


# --- "coalesced": one scaling and one collective over many tensors -----------------------------


def test_two_gradients_in_one_list() -> None:
    assert_expected_inline(
        check(two_gradients, [tensor(2, 3), tensor(4)], coalesced()),
        """\
x_1: f32[2, 3]
y_1: f32[4]
neg: f32[2, 3] = neg(x_1)
neg_1: f32[4] = neg(y_1)
all_reduce_coalesced_default: (f32[2, 3], f32[4]) = all_reduce_coalesced([neg, neg_1], 'avg', 'ddp0')
getitem: f32[2, 3] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[2, 3] = wait_tensor(getitem)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_1)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )


def test_one_division() -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b")

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], coalesced(scaling="bucket")),
        """\
x_1: f32[4]
y_1: f32[4]
_foreach_div_scalar: (f32[4], f32[4]) = _foreach_div([x_1, y_1], 2.0)
getitem: f32[4] = getitem(_foreach_div_scalar, 0)
getitem_1: f32[4] = getitem(_foreach_div_scalar, 1)
all_reduce_coalesced_default: (f32[4], f32[4]) = all_reduce_coalesced([getitem, getitem_1], 'sum', 'ddp0')
getitem_2: f32[4] = getitem(all_reduce_coalesced_default, 0)
getitem_3: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[4] = wait_tensor(getitem_2)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_3)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )


def test_gradients_that_are_not_contiguous_are_copied_first() -> None:
    def backward(x, y):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    text = check(backward, [tensor(2, 3, stride=(1, 2)), tensor(4)], coalesced())
    assert "clone_default: f32[2, 3] = clone(neg, memory_format=torch.contiguous_format)" in text
    assert "all_reduce_coalesced([clone_default, neg_1], 'avg', 'ddp0')" in text


# --- Which gradients share a bucket ------------------------------------------------------------


@pytest.fixture(params=["concat", "coalesced"])
def fuse(request: pytest.FixtureRequest) -> RewriteFor:
    return {"concat": concat(), "coalesced": coalesced()}[request.param]


def _launches(text: str) -> int:
    return sum(" = all_reduce" in line for line in text.splitlines())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_all_dtypes(fuse: RewriteFor, dtype: torch.dtype) -> None:
    def backward(x, y, z):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b"), reduce(torch.neg(z), "c")

    inputs = [tensor(2, 3, dtype=dtype), tensor(dtype=dtype), tensor(4, 0, dtype=dtype)]
    assert _launches(check(backward, inputs, fuse)) == 1


def test_gradients_in_any_layout(fuse: RewriteFor) -> None:
    def backward(x, y, z):
        expanded = torch.ops.aten.expand.default(z, [2, 3])
        return reduce(torch.neg(x), "a"), reduce(y, "b"), reduce(expanded, "c")

    inputs = [
        tensor(2, 3, 2, 2, stride=(12, 1, 6, 3)),
        tensor(3, 2, stride=(1, 3)),
        tensor(3),
    ]
    assert _launches(check(backward, inputs, fuse)) == 1


@pytest.mark.parametrize(
    ("backward", "spec"),
    [
        pytest.param(
            lambda x, y: (reduce(torch.neg(x), "a"), reduce_into(y, x, "b"), reduce(x.abs(), "c")),
            tensor(4),
            id="new and existing ones",
        ),
        pytest.param(
            lambda x, y: [reduce(gradient, name) for gradient in [x + y] for name in "ab"],
            tensor(4),
            id="the same gradient twice",
        ),
        pytest.param(
            lambda x, y: reduce_into(y, torch.neg(x), "a"),
            tensor(2, 3, stride=(1, 2)),
            id="an existing one in another layout",
        ),
        pytest.param(lambda x, y: reduce(x, "a"), tensor(4), id="one alone"),
    ],
)
def test_forms_of_gradients(fuse: RewriteFor, backward: Backward, spec: TensorSpec) -> None:
    assert _launches(check(backward, [spec] * 2, fuse)) == 1


# --- Only equal keys share a bucket ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        pytest.param({"module": "ddp1"}, tensor(4), id="two modules on one group"),
        pytest.param({"module": "ddp2"}, tensor(4), id="two groups"),
        pytest.param({}, tensor(4, dtype=torch.bfloat16), id="two dtypes"),
        pytest.param({}, tensor(4, device="cuda"), id="two devices"),
        pytest.param({"divide": 4}, tensor(4), id="two divisors"),
        pytest.param({"divide": None}, tensor(4), id="a division and none"),
    ],
)
def test_near_misses_do_not_share_a_bucket(
    fuse: RewriteFor, options: dict[str, Any], spec: TensorSpec
) -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b", **options)

    assert _launches(check(backward, [tensor(4), spec], fuse)) == 2


def test_a_collective_of_no_module_is_in_no_bucket(fuse: RewriteFor) -> None:
    def backward(x, y):
        return reduce(x, "a"), all_reduce(torch.div(y, 2), "sum", "elsewhere")

    assert _launches(check(backward, [tensor(4)] * 2, fuse)) == 2


def _negated(*inputs):
    return [reduce(torch.neg(x), name) for x, name in zip(inputs, "abcdef", strict=False)]


def test_equal_keys_need_not_be_neighbours(fuse: RewriteFor) -> None:
    inputs = [tensor(4), tensor(4, dtype=torch.bfloat16), tensor(4)]
    assert _launches(check(_negated, inputs, fuse)) == 2


@pytest.mark.parametrize("fuse_under", [concat, coalesced])
def test_three_buckets_of_one_key(fuse_under: Callable[..., RewriteFor]) -> None:
    assert _launches(check(_negated, [tensor(4)] * 6, fuse_under(32))) == 3


# --- The rest of the graph ---------------------------------------------------------------------


def test_a_write_that_moves_stays_behind_the_reads_before_it(fuse: RewriteFor) -> None:
    def backward(x, y, grad):
        before = torch.neg(grad)
        grad.copy_(reduce(x, "a"))
        return before, reduce(y, "b"), torch.neg(y)

    check(backward, [tensor(4)] * 3, fuse)


def test_a_read_behind_a_write_that_moves_stays_behind_it(fuse: RewriteFor) -> None:
    def backward(x, y, grad):
        grad.copy_(reduce(x, "a"))
        view = torch.ops.aten.reshape.default(grad, [2, 2])
        return torch.neg(view), reduce(y, "b")

    check(backward, [tensor(4)] * 3, fuse)


def test_other_collectives_keep_their_order(fuse: RewriteFor) -> None:
    """The first needs the result of ``a`` and so moves after the bucket; the second moves with
    it."""

    def backward(x, y):
        first = all_reduce(reduce(x, "a"), "sum", "tensor_parallel")
        second = all_reduce(torch.neg(y), "max", "tensor_parallel")
        return first, second, reduce(torch.abs(y), "b")

    check(backward, [tensor(4)] * 2, fuse)
