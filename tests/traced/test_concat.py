"""One flat buffer, one scaling, one all-reduce: what the graph looks like then."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from tests.support.graphs import Backward, cast, check, concat, reduce, reduce_into, tensor


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
