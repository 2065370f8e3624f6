# ruff: noqa: E501  (a golden has one line a node)
"""One scaling and one collective over many tensors: what the graph looks like then."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from tests.support.graphs import check, coalesced, reduce, tensor


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
