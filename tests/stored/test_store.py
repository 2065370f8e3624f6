# ruff: noqa: E501  (a golden has one line a node)
"""Gradients that a compiled backward stores in the memory of a reducer: what the graph looks like
then, and what is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fusion_passes.graph.text import graph_text
from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import InputPosition
from fusion_passes.stored.pieces import StoredInput
from fusion_passes.stored.store import StoreGradients
from tests.support.graphs import tensor, trace

CPU = torch.device("cpu")
LARGE = BucketCaps(2**20, 2**20)


def stored(index: int, *shape: int, module: int = 0, place: Any = None) -> StoredInput:
    strides = tuple(torch.empty(shape, device="meta").stride())
    return StoredInput(
        index, InputPosition(index), module, shape, strides, torch.float32, CPU, place
    )


def check(
    module: fx.GraphModule, inputs: Sequence[StoredInput], num_inputs: int, *caps: BucketCaps
) -> str:
    """The text of the graph after the pass; asserts the changed flag, and that the pass runs
    once."""
    before = graph_text(module.graph)
    run = StoreGradients(tuple(inputs), num_inputs, caps or (LARGE,))
    changed = run(module.graph)
    after = graph_text(module.graph)
    assert changed == (after != before)
    module.graph.lint()
    assert not run(module.graph)
    assert graph_text(module.graph) == after
    return after


def two_layers(tangents_1: Tensor, x: Tensor, hidden: Tensor, w: Tensor) -> Any:
    """A backward. The pass recognizes one by the name of its first input."""
    second = tangents_1.t() @ hidden
    bias = tangents_1.sum(0)
    first = (tangents_1 @ w).t() @ x
    return [first, second, bias, None]


INPUTS = [tensor(4, 8), tensor(4, 16), tensor(4, 16), tensor(8, 16)]


def test_one_piece() -> None:
    inputs = [stored(0, 16, 16), stored(1, 8, 16), stored(2, 8)]
    assert_expected_inline(
        check(trace(two_layers, INPUTS), inputs, 4),
        """\
tangents_1_1: f32[4, 8]
x_1: f32[4, 16]
hidden_1: f32[4, 16]
w_1: f32[8, 16]
t: f32[8, 4]strides[1, 8] = t(tangents_1_1)
bucket_default: f32[392] = bucket('[1, 0, 2]', '[0, 128, 384]', 392, torch.float32, cpu)
mm: f32[8, 16] = mm(t, hidden_1)
sum_1: f32[8] = sum(tangents_1_1, [0])
mm_1: f32[4, 16] = mm(tangents_1_1, w_1)
t_1: f32[16, 4]strides[1, 16] = t(mm_1)
mm_2: f32[16, 16] = mm(t_1, x_1)
store_gradients__default: ? = store_gradients_(bucket_default, [mm, mm_2, sum_1], [0, 128, 384], [16, 1, 16, 1, 1], [1, 0, 2])
as_strided_default: f32[8, 16] = as_strided(bucket_default, [8, 16], [16, 1], 0)
as_strided_default_1: f32[16, 16] = as_strided(bucket_default, [16, 16], [16, 1], 128)
as_strided_default_2: f32[8] = as_strided(bucket_default, [8], [1], 384)
return (as_strided_default_1, as_strided_default, as_strided_default_2, None)
""",
    )


def test_two_pieces() -> None:
    inputs = [stored(0, 16, 16), stored(1, 8, 16), stored(2, 8)]
    caps = BucketCaps(8 * 16 * 4, 8 * 16 * 4)
    assert_expected_inline(
        check(trace(two_layers, INPUTS), inputs, 4, caps),
        """\
tangents_1_1: f32[4, 8]
x_1: f32[4, 16]
hidden_1: f32[4, 16]
w_1: f32[8, 16]
t: f32[8, 4]strides[1, 8] = t(tangents_1_1)
bucket_default: f32[136] = bucket('[1, 2]', '[0, 128]', 136, torch.float32, cpu)
mm: f32[8, 16] = mm(t, hidden_1)
sum_1: f32[8] = sum(tangents_1_1, [0])
store_gradients__default: ? = store_gradients_(bucket_default, [mm, sum_1], [0, 128], [16, 1, 1], [1, 2])
as_strided_default: f32[8, 16] = as_strided(bucket_default, [8, 16], [16, 1], 0)
as_strided_default_1: f32[8] = as_strided(bucket_default, [8], [1], 128)
pinned_mm_1: ? = pinned_mm_1()
pinned_mm_2: f32[4, 16] = control_deps((bucket_default), pinned_mm_1, tangents_1_1, w_1)
t_1: f32[16, 4]strides[1, 16] = t(pinned_mm_2)
bucket_default_1: f32[256] = bucket('[0]', '[0]', 256, torch.float32, cpu)
mm_2: f32[16, 16] = mm(t_1, x_1)
store_gradients__default_1: ? = store_gradients_(bucket_default_1, [mm_2], [0], [16, 1], [0])
as_strided_default_2: f32[16, 16] = as_strided(bucket_default_1, [16, 16], [16, 1], 0)
return (as_strided_default_2, as_strided_default, as_strided_default_1, None)
""",
    )


def test_cut_as_the_layout_is() -> None:
    inputs = [
        stored(0, 16, 16, place=(1, 0)),
        stored(1, 8, 16, place=(0, 8)),
        stored(2, 8, place=(0, 136)),
    ]
    text = check(trace(two_layers, INPUTS), inputs, 4)
    assert "bucket('[1, 2]', '[8, 136]', 144, torch.float32" in text
    assert "bucket('[0]', '[0]', 256, torch.float32" in text


def test_a_module_without_a_layout_beside_one_that_has_it() -> None:
    inputs = [stored(0, 16, 16, place=(0, 8)), stored(1, 8, 16, module=1), stored(2, 8, module=1)]
    text = check(trace(two_layers, INPUTS), inputs, 4, LARGE, LARGE)
    assert "bucket('[0]', '[8]', 264, torch.float32" in text
    assert "bucket('[1, 2]', '[0, 128]', 136, torch.float32" in text


def test_the_next_kernel_follows_all_stores_before_it() -> None:
    def backward(tangents_1: Tensor, x: Tensor) -> Any:
        return [tangents_1.sum(0), x.sum(0), tangents_1.t() @ x, tangents_1 @ x.t()]

    inputs = [stored(0, 8), stored(1, 8, module=1)]
    text = check(trace(backward, [tensor(4, 8), tensor(4, 8)]), inputs, 4, LARGE, LARGE)
    assert text.count("control_deps") == 1
    assert "control_deps((bucket_default, bucket_default_1), pinned_mm, t, x_1)" in text


def test_two_modules_have_pieces_of_their_own() -> None:
    inputs = [stored(0, 16, 16, module=1), stored(1, 8, 16), stored(2, 8)]
    text = check(trace(two_layers, INPUTS), inputs, 4, LARGE, LARGE)
    assert text.count("store_gradients_(") == 2


def test_other_shapes_are_left_alone() -> None:
    inputs = [stored(0, 16, 4), stored(1, 16, 8), stored(2, 4)]
    assert "bucket(" not in check(trace(two_layers, INPUTS), inputs, 4)


def test_a_graph_that_is_no_backward_is_left_alone() -> None:
    def forward(x: Tensor, y: Tensor) -> Any:
        return [x.t() @ y, None]

    assert "bucket(" not in check(
        trace(forward, [tensor(4, 8), tensor(4, 8)]), [stored(0, 8, 8)], 2
    )


def test_other_outputs_than_gradients_are_left_alone() -> None:
    inputs = [stored(0, 16, 16)]
    assert "bucket(" not in check(trace(two_layers, INPUTS), inputs, 3)


def test_a_gradient_of_two_parameters_is_stored_once() -> None:
    def backward(tangents_1: Tensor, x: Tensor) -> Any:
        both = tangents_1.t() @ x
        return [both, both]

    text = check(
        trace(backward, [tensor(4, 8), tensor(4, 16)]), [stored(0, 8, 16), stored(1, 8, 16)], 2
    )
    assert text.count("store_gradients_(") == 1
    assert "[0, 1]" not in text


def test_collectives_and_stores_keep_their_order() -> None:
    """Two stores before a collective, and one after it. The lowering notifies the reducer after the
    collective."""

    def backward(tangents_1: Tensor, x: Tensor) -> Any:
        first, second = tangents_1.sum(0), x.sum(0)
        reduced = torch.ops._c10d_functional.all_reduce.default(tangents_1, "sum", "0")
        third = torch.ops._c10d_functional.wait_tensor.default(reduced).sum(1)
        return [first, second, third]

    inputs = [stored(0, 8, module=0), stored(1, 8, module=1), stored(2, 4, module=2)]
    text = check(trace(backward, [tensor(4, 8), tensor(4, 8)]), inputs, 3, LARGE, LARGE, LARGE)
    assert_expected_inline(
        text,
        """\
tangents_1_1: f32[4, 8]
x_1: f32[4, 8]
bucket_default: f32[8] = bucket('[0]', '[0]', 8, torch.float32, cpu)
sum_1: f32[8] = sum(tangents_1_1, [0])
store_gradients__default: ? = store_gradients_(bucket_default, [sum_1], [0], [1], [0])
as_strided_default: f32[8] = as_strided(bucket_default, [8], [1], 0)
bucket_default_1: f32[8] = bucket('[1]', '[0]', 8, torch.float32, cpu)
sum_2: f32[8] = sum(x_1, [0])
store_gradients__default_1: ? = store_gradients_(bucket_default_1, [sum_2], [0], [1], [1])
as_strided_default_1: f32[8] = as_strided(bucket_default_1, [8], [1], 0)
pinned_all_reduce: ? = pinned_all_reduce()
pinned_all_reduce_1: f32[4, 8] = control_deps((bucket_default, bucket_default_1), pinned_all_reduce, tangents_1_1)
wait_tensor: f32[4, 8] = wait_tensor(pinned_all_reduce_1)
bucket_default_2: f32[4] = bucket('[2]', '[0]', 4, torch.float32, cpu)
sum_3: f32[4] = sum(wait_tensor, [1])
store_gradients__default_2: ? = store_gradients_(bucket_default_2, [sum_3], [0], [1], [2])
as_strided_default_2: f32[4] = as_strided(bucket_default_2, [4], [1], 0)
return (as_strided_default, as_strided_default_1, as_strided_default_2)
""",
    )
