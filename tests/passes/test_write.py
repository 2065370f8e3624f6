# ruff: noqa: E501  (a golden has one line a node)
"""Existing gradients of a bucket are written by one operator."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fusion_passes.graph.collectives import ALL_REDUCE_COALESCED, WAIT
from fusion_passes.passes.write import WriteGradsTogether
from testing.graphs import (
    Backward,
    RewriteFor,
    chain,
    check,
    coalesced,
    concat,
    groups_of,
    reduce,
    reduce_as,
    reduce_into,
    tensor,
)

_aten = torch.ops.aten


def write() -> RewriteFor:
    return lambda graph: WriteGradsTogether(groups_of(graph))


def after_concat() -> RewriteFor:
    return chain(concat(), write())


def writes(function: Backward, *inputs, fuse: RewriteFor | None = None) -> tuple[int, int]:
    """How many writes of one gradient, and of several, a graph has in the end."""
    text = check(function, list(inputs), chain(fuse or concat(), write()))
    return text.count(" = copy_("), text.count(" = _foreach_copy_(")


def test_two_existing_gradients() -> None:
    def backward(a, b, x, y):
        return reduce_into(a, x, "a"), reduce_into(b, y, "b")

    assert_expected_inline(
        check(backward, [tensor(2, 3), tensor(4)] * 2, after_concat()),
        """\
a_1: f32[2, 3]
b_1: f32[4]
x_1: f32[2, 3]
y_1: f32[4]
add: f32[2, 3] = add(a_1, x_1)
add_1: f32[4] = add(b_1, y_1)
pack_default: f32[10] = pack([add, add_1], [4, 0], [3, 1, 1], torch.float32, 'div', 2.0, False, 'plan:0')
all_reduce_default: f32[10] = all_reduce(pack_default, 'sum', 'ddp0')
wait_tensor_default: f32[10] = wait_tensor(all_reduce_default)
as_strided_default: f32[2, 3] = as_strided(wait_tensor_default, [2, 3], [3, 1], 4)
as_strided_default_1: f32[4] = as_strided(wait_tensor_default, [4], [1], 0)
_foreach_copy__default: ? = _foreach_copy_([a_1, b_1], [as_strided_default, as_strided_default_1])
return (a_1, b_1)
""",
    )


def test_results_that_are_cast_back() -> None:
    def backward(a, b, x, y):
        a.copy_(reduce_as(x, "a", torch.bfloat16))
        b.copy_(reduce_as(y, "b", torch.bfloat16))

    assert writes(backward, *[tensor(4)] * 4) == (0, 1)


def test_complex_gradients() -> None:
    def backward(a, b, x, y):
        reduce_into(a, x, "a")
        reduce_into(b, y, "b")

    assert writes(backward, *[tensor(4, dtype=torch.complex64)] * 4) == (0, 1)


def test_each_bucket_for_itself() -> None:
    def backward(a, b, c, d, x):
        for grad, name, module in ((a, "a", 0), (b, "b", 0), (c, "c", 1), (d, "d", 1)):
            reduce_into(grad, x, name, module=f"ddp{module}")

    assert writes(backward, *[tensor(4)] * 5) == (0, 2)


def test_one_alone_keeps_its_copy() -> None:
    assert writes(lambda a, x: reduce_into(a, x, "a"), *[tensor(4)] * 2) == (1, 0)


def test_new_gradients_are_not_written() -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b")

    assert writes(backward, *[tensor(4)] * 2) == (0, 0)


def test_a_new_gradient_beside_existing_ones() -> None:
    def backward(a, b, x):
        reduce_into(a, x, "a")
        return reduce(x, "c"), reduce_into(b, x, "b")

    assert writes(backward, *[tensor(4)] * 3) == (0, 1)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda a, copied: torch.neg(copied), id="read"),
        pytest.param(lambda a, copied: a.copy_(torch.neg(a)), id="written again"),
    ],
)
def test_what_the_graph_goes_on_with_keeps_its_copy(after: Backward) -> None:
    def backward(a, b, c, x):
        result = after(a, reduce_into(a, x, "a"))
        reduce_into(b, x, "b")
        reduce_into(c, x, "c")
        return result

    ones, together = writes(backward, *[tensor(4)] * 4)
    assert ones >= 1
    assert together == 1


def test_what_is_no_input_keeps_its_copy() -> None:
    def backward(b, c, x):
        own = torch.neg(x)
        reduce_into(own, x, "a")
        reduce_into(b, x, "b")
        reduce_into(c, x, "c")
        return own

    assert writes(backward, *[tensor(4)] * 3) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_coalesced_results(dtype: torch.dtype) -> None:
    def backward(a, b, x, y):
        reduce_into(a, x, "a")
        reduce_into(b, y, "b")

    assert writes(backward, *[tensor(4, dtype=dtype)] * 4, fuse=coalesced()) == (0, 1)


def test_coalesced_results_that_are_cast_back() -> None:
    def backward(a, b, x, y):
        a.copy_(reduce_as(x, "a", torch.bfloat16))
        b.copy_(reduce_as(y, "b", torch.bfloat16))

    assert writes(backward, *[tensor(4)] * 4, fuse=coalesced()) == (0, 1)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda result: _aten.div.Scalar(result, 4), id="div.Scalar"),
        pytest.param(lambda result: _aten.mul.Scalar(result, 4), id="mul.Scalar"),
        pytest.param(lambda result: result.unsqueeze(0).squeeze(0), id="views"),
        pytest.param(lambda result: result.permute(1, 0).permute(1, 0), id="permuted"),
        pytest.param(lambda result: result.clone(), id="clone"),
    ],
)
@pytest.mark.parametrize("fuse", [concat(), coalesced()], ids=["concat", "coalesced"])
def test_what_leaves_a_result_that_gradient_does_not_keep_it_apart(
    form: Backward, fuse: RewriteFor
) -> None:
    def backward(a, b, x, y):
        a.copy_(form(reduce(x, "a")))
        b.copy_(form(reduce(y, "b")))

    assert writes(backward, *[tensor(2, 3)] * 4, fuse=fuse) == (0, 1)


def test_results_that_are_laid_out_anew_beside_another_reader() -> None:
    """Without the other reader, the change of layout would be a part of the reduction."""

    def backward(a, b, x, y):
        results = reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b")
        a.copy_(_aten.copy.default(x, results[0]))
        b.copy_(_aten.copy.default(y, results[1]))
        return results

    assert writes(backward, *[tensor(2, 3, stride=(1, 2))] * 4) == (0, 1)


def test_results_of_other_collectives_are_left_alone() -> None:
    def backward(a, b, x):
        launched = ALL_REDUCE_COALESCED([x, torch.neg(x)], "sum", "tensor_parallel")
        a.copy_(WAIT(launched[0]))
        b.copy_(WAIT(launched[1]))

    assert writes(backward, *[tensor(4)] * 3) == (2, 0)
