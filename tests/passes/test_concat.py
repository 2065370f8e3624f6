"""One flat buffer, one scaling, one all-reduce: what the graph looks like then."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from tests.support.graphs import (
    check,
    concat,
    reduce,
    reduce_as,
    reduce_into,
    reduce_relaid,
    tensor,
)


def test_two_gradients() -> None:
    def backward(x, y):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3), tensor(4)], concat()),
        """\
x_1: f32[2, 3]
y_1: f32[4]
neg: f32[2, 3] = neg(x_1)
neg_1: f32[4] = neg(y_1)
reshape_default: f32[6] = reshape(neg, [-1])
reshape_default_1: f32[4] = reshape(neg_1, [-1])
cat_default: f32[10] = cat([reshape_default, reshape_default_1])
div_tensor: f32[10] = div(cat_default, 2)
all_reduce_default: f32[10] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[6], f32[4]) = split_with_sizes(wait_tensor_default, [6, 4])
getitem: f32[6] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[2, 3] = reshape(getitem, [2, 3])
return (reshape_default_2, getitem_1)
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
reshape_default: f32[6] = reshape(add, [-1])
reshape_default_1: f32[4] = reshape(add_1, [-1])
cat_default: f32[10] = cat([reshape_default, reshape_default_1])
div_tensor: f32[10] = div(cat_default, 2)
all_reduce_default: f32[10] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[6], f32[4]) = split_with_sizes(wait_tensor_default, [6, 4])
getitem: f32[6] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[2, 3] = reshape(getitem, [2, 3])
copy_: f32[2, 3] = copy_(a_1, reshape_default_2)
copy__1: f32[4] = copy_(b_1, getitem_1)
return None
""",
    )


def test_one_multiplication() -> None:
    def backward(x, y):
        return reduce(x, "a", multiply=0.25), reduce(y, "b", multiply=0.25)

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], concat()),
        """\
x_1: f32[4]
y_1: f32[4]
reshape_default: f32[4] = reshape(x_1, [-1])
reshape_default_1: f32[4] = reshape(y_1, [-1])
cat_default: f32[8] = cat([reshape_default, reshape_default_1])
mul_tensor: f32[8] = mul(cat_default, 0.25)
all_reduce_default: f32[8] = all_reduce(mul_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[8] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[4], f32[4]) = split_with_sizes(wait_tensor_default, [4, 4])
getitem: f32[4] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
return (getitem, getitem_1)
""",
    )


def test_avg_without_scaling() -> None:
    def backward(x, y):
        return reduce(x, "a", op="avg", divide=None), reduce(y, "b", op="avg", divide=None)

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], concat()),
        """\
x_1: f32[4]
y_1: f32[4]
reshape_default: f32[4] = reshape(x_1, [-1])
reshape_default_1: f32[4] = reshape(y_1, [-1])
cat_default: f32[8] = cat([reshape_default, reshape_default_1])
all_reduce_default: f32[8] = all_reduce(cat_default, 'avg', 'ddp0')
wait_tensor_default: f32[8] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[4], f32[4]) = split_with_sizes(wait_tensor_default, [4, 4])
getitem: f32[4] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
return (getitem, getitem_1)
""",
    )


def test_a_compressed_bucket_is_sent_in_the_small_dtype() -> None:
    def backward(x, y):
        return reduce_as(x, "a", torch.bfloat16), reduce_as(y, "b", torch.bfloat16)

    assert_expected_inline(
        check(backward, [tensor(4), tensor(4)], concat()),
        """\
x_1: f32[4]
y_1: f32[4]
convert_element_type: bf16[4] = convert_element_type(x_1, torch.bfloat16)
convert_element_type_2: bf16[4] = convert_element_type(y_1, torch.bfloat16)
reshape_default: bf16[4] = reshape(convert_element_type, [-1])
reshape_default_1: bf16[4] = reshape(convert_element_type_2, [-1])
cat_default: bf16[8] = cat([reshape_default, reshape_default_1])
div_tensor: bf16[8] = div(cat_default, 2)
all_reduce_default: bf16[8] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: bf16[8] = wait_tensor(all_reduce_default)
split_with_sizes_default: (bf16[4], bf16[4]) = split_with_sizes(wait_tensor_default, [4, 4])
getitem: bf16[4] = getitem(split_with_sizes_default, 0)
convert_element_type_1: f32[4] = convert_element_type(getitem, torch.float32)
getitem_1: bf16[4] = getitem(split_with_sizes_default, 1)
convert_element_type_3: f32[4] = convert_element_type(getitem_1, torch.float32)
return (convert_element_type_1, convert_element_type_3)
""",
    )


def test_a_change_of_layout_reads_the_piece() -> None:
    def backward(x, y):
        return reduce_relaid(torch.neg(x), "a"), reduce(torch.neg(y), "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3, stride=(1, 2)), tensor(4)], concat()),
        """\
x_1: f32[2, 3]strides[1, 2]
y_1: f32[4]
neg: f32[2, 3]strides[1, 2] = neg(x_1)
neg_1: f32[4] = neg(y_1)
reshape_default: f32[6] = reshape(neg, [-1])
reshape_default_1: f32[4] = reshape(neg_1, [-1])
cat_default: f32[10] = cat([reshape_default, reshape_default_1])
div_tensor: f32[10] = div(cat_default, 2)
all_reduce_default: f32[10] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[6], f32[4]) = split_with_sizes(wait_tensor_default, [6, 4])
getitem: f32[6] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[2, 3] = reshape(getitem, [2, 3])
copy: f32[2, 3]strides[1, 2] = copy(neg, reshape_default_2)
return (copy, getitem_1)
""",
    )


def test_scalars_and_empty_gradients_have_their_piece() -> None:
    def backward(x, y, z):
        return reduce(x, "scalar"), reduce(y, "empty"), reduce(z, "c")

    assert_expected_inline(
        check(backward, [tensor(), tensor(0, 4), tensor(4)], concat()),
        """\
x_1: f32[]
y_1: f32[0, 4]
z_1: f32[4]
reshape_default: f32[1] = reshape(x_1, [-1])
reshape_default_1: f32[4] = reshape(z_1, [-1])
cat_default: f32[5] = cat([reshape_default, reshape_default_1])
div_tensor: f32[5] = div(cat_default, 2)
all_reduce_default: f32[5] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[5] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[1], f32[4]) = split_with_sizes(wait_tensor_default, [1, 4])
getitem: f32[1] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[] = reshape(getitem, [])
clone_default: f32[0, 4] = clone(y_1, memory_format=torch.contiguous_format)
return (reshape_default_2, clone_default, getitem_1)
""",
    )


def test_complex_gradients_are_packed_as_pairs() -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b")

    assert_expected_inline(
        check(backward, [tensor(2, dtype=torch.complex64)] * 2, concat()),
        """\
x_1: c64[2]
y_1: c64[2]
view_as_real_default: f32[2, 2] = view_as_real(x_1)
view_as_real_default_1: f32[2, 2] = view_as_real(y_1)
reshape_default: f32[4] = reshape(view_as_real_default, [-1])
reshape_default_1: f32[4] = reshape(view_as_real_default_1, [-1])
cat_default: f32[8] = cat([reshape_default, reshape_default_1])
div_tensor: f32[8] = div(cat_default, 2)
all_reduce_default: f32[8] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[8] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[4], f32[4]) = split_with_sizes(wait_tensor_default, [4, 4])
getitem: f32[4] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[2, 2] = reshape(getitem, [2, 2])
reshape_default_3: f32[2, 2] = reshape(getitem_1, [2, 2])
view_as_complex_default: c64[2] = view_as_complex(reshape_default_2)
view_as_complex_default_1: c64[2] = view_as_complex(reshape_default_3)
return (view_as_complex_default, view_as_complex_default_1)
""",
    )


def test_the_same_gradient_twice() -> None:
    def backward(x):
        gradient = torch.neg(x)
        return reduce(gradient, "a"), reduce(gradient, "b")

    assert_expected_inline(
        check(backward, [tensor(4)], concat()),
        """\
x_1: f32[4]
neg: f32[4] = neg(x_1)
reshape_default: f32[4] = reshape(neg, [-1])
reshape_default_1: f32[4] = reshape(neg, [-1])
cat_default: f32[8] = cat([reshape_default, reshape_default_1])
div_tensor: f32[8] = div(cat_default, 2)
all_reduce_default: f32[8] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[8] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[4], f32[4]) = split_with_sizes(wait_tensor_default, [4, 4])
getitem: f32[4] = getitem(split_with_sizes_default, 0)
getitem_1: f32[4] = getitem(split_with_sizes_default, 1)
return (getitem, getitem_1)
""",
    )


def test_gradients_that_share_memory_with_something_else() -> None:
    def backward(x):
        expanded = torch.ops.aten.expand.default(x, [2, 3])
        return reduce(expanded, "a"), reduce(torch.ops.aten.permute.default(expanded, [1, 0]), "b")

    assert_expected_inline(
        check(backward, [tensor(3)], concat()),
        """\
x_1: f32[3]
expand: f32[2, 3]strides[0, 1] = expand(x_1, [2, 3])
permute: f32[3, 2]strides[1, 0] = permute(expand, [1, 0])
reshape_default: f32[6] = reshape(expand, [-1])
reshape_default_1: f32[6] = reshape(permute, [-1])
cat_default: f32[12] = cat([reshape_default, reshape_default_1])
div_tensor: f32[12] = div(cat_default, 2)
all_reduce_default: f32[12] = all_reduce(div_tensor, 'sum', 'ddp0')
wait_tensor_default: f32[12] = wait_tensor(all_reduce_default)
split_with_sizes_default: (f32[6], f32[6]) = split_with_sizes(wait_tensor_default, [6, 6])
getitem: f32[6] = getitem(split_with_sizes_default, 0)
getitem_1: f32[6] = getitem(split_with_sizes_default, 1)
reshape_default_2: f32[2, 3] = reshape(getitem, [2, 3])
reshape_default_3: f32[3, 2] = reshape(getitem_1, [3, 2])
return (reshape_default_2, reshape_default_3)
""",
    )
