# ruff: noqa: E501  (a golden has one line a node)
"""One scaling and one collective over many tensors: what the graph looks like then."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from testing.graphs import check, coalesced, reduce, reduce_into, tensor


def test_two_gradients() -> None:
    def backward(x, y):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3), tensor(4)], coalesced()),
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


def test_existing_grads() -> None:
    def backward(x, y, a, b):
        reduce_into(a, torch.neg(x), "a")
        reduce_into(b, torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3), tensor(4), tensor(2, 3), tensor(4)], coalesced()),
        """\
x_1: f32[2, 3]
y_1: f32[4]
a_1: f32[2, 3]
b_1: f32[4]
neg: f32[2, 3] = neg(x_1)
add: f32[2, 3] = add(a_1, neg)
neg_1: f32[4] = neg(y_1)
add_1: f32[4] = add(b_1, neg_1)
all_reduce_coalesced_default: (f32[2, 3], f32[4]) = all_reduce_coalesced([add, add_1], 'avg', 'ddp0')
getitem: f32[2, 3] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[2, 3] = wait_tensor(getitem)
copy_: f32[2, 3] = copy_(a_1, wait_tensor_default)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_1)
copy__1: f32[4] = copy_(b_1, wait_tensor_default_1)
return None
""",
    )


def test_one_multiplication() -> None:
    def backward(x, y):
        return reduce(x, "a", multiply=0.25), reduce(y, "b", multiply=0.25)

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], coalesced()),
        """\
x_1: f32[4]
y_1: f32[4]
_foreach_mul_scalar: (f32[4], f32[4]) = _foreach_mul([x_1, y_1], 0.25)
getitem: f32[4] = getitem(_foreach_mul_scalar, 0)
getitem_1: f32[4] = getitem(_foreach_mul_scalar, 1)
all_reduce_coalesced_default: (f32[4], f32[4]) = all_reduce_coalesced([getitem, getitem_1], 'sum', 'ddp0')
getitem_2: f32[4] = getitem(all_reduce_coalesced_default, 0)
getitem_3: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[4] = wait_tensor(getitem_2)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_3)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )


def test_avg_without_scaling() -> None:
    def backward(x, y):
        return reduce(x, "a", op="avg", divide=None), reduce(y, "b", op="avg", divide=None)

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], coalesced()),
        """\
x_1: f32[4]
y_1: f32[4]
all_reduce_coalesced_default: (f32[4], f32[4]) = all_reduce_coalesced([x_1, y_1], 'avg', 'ddp0')
getitem: f32[4] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[4] = wait_tensor(getitem)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_1)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )


def test_gradients_that_are_not_contiguous_are_copied_first() -> None:
    def backward(x, y):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3, stride=(1, 2)), tensor(4)], coalesced()),
        """\
x_1: f32[2, 3]strides[1, 2]
y_1: f32[4]
neg: f32[2, 3]strides[1, 2] = neg(x_1)
neg_1: f32[4] = neg(y_1)
clone_default: f32[2, 3] = clone(neg, memory_format=torch.contiguous_format)
all_reduce_coalesced_default: (f32[2, 3], f32[4]) = all_reduce_coalesced([clone_default, neg_1], 'avg', 'ddp0')
getitem: f32[2, 3] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[2, 3] = wait_tensor(getitem)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_1)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )


def test_scalars_and_empty_gradients() -> None:
    def backward(x, y, z):
        return reduce(x, "scalar"), reduce(y, "empty"), reduce(z, "c")

    assert_expected_inline(
        check(backward, [tensor(), tensor(0, 4), tensor(4)], coalesced()),
        """\
x_1: f32[]
y_1: f32[0, 4]
z_1: f32[4]
all_reduce_coalesced_default: (f32[], f32[0, 4], f32[4]) = all_reduce_coalesced([x_1, y_1, z_1], 'avg', 'ddp0')
getitem: f32[] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[0, 4] = getitem(all_reduce_coalesced_default, 1)
getitem_2: f32[4] = getitem(all_reduce_coalesced_default, 2)
wait_tensor_default: f32[] = wait_tensor(getitem)
wait_tensor_default_1: f32[0, 4] = wait_tensor(getitem_1)
wait_tensor_default_2: f32[4] = wait_tensor(getitem_2)
return (wait_tensor_default, wait_tensor_default_1, wait_tensor_default_2)
""",
    )


def test_complex_gradients_are_sent_as_pairs() -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b")

    assert_expected_inline(
        check(backward, [tensor(2, dtype=torch.complex64)] * 2, coalesced()),
        """\
x_1: c64[2]
y_1: c64[2]
view_as_real_default: f32[2, 2] = view_as_real(x_1)
view_as_real_default_1: f32[2, 2] = view_as_real(y_1)
all_reduce_coalesced_default: (f32[2, 2], f32[2, 2]) = all_reduce_coalesced([view_as_real_default, view_as_real_default_1], 'avg', 'ddp0')
getitem: f32[2, 2] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[2, 2] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[2, 2] = wait_tensor(getitem)
wait_tensor_default_1: f32[2, 2] = wait_tensor(getitem_1)
as_complex_default: c64[2] = as_complex(wait_tensor_default)
as_complex_default_1: c64[2] = as_complex(wait_tensor_default_1)
return (as_complex_default, as_complex_default_1)
""",
    )


def test_the_same_gradient_twice() -> None:
    def backward(x):
        gradient = torch.neg(x)
        return reduce(gradient, "a"), reduce(gradient, "b")

    assert_expected_inline(
        check(backward, [tensor(4)], coalesced()),
        """\
x_1: f32[4]
neg: f32[4] = neg(x_1)
all_reduce_coalesced_default: (f32[4], f32[4]) = all_reduce_coalesced([neg, neg], 'avg', 'ddp0')
getitem: f32[4] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[4] = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default: f32[4] = wait_tensor(getitem)
wait_tensor_default_1: f32[4] = wait_tensor(getitem_1)
return (wait_tensor_default, wait_tensor_default_1)
""",
    )
