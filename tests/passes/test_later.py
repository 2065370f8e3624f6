# ruff: noqa: E501  (a golden has one line a node)
"""What cannot be fused of DDP's reductions follows the backward."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fusion_passes.agreement.launches import Collective
from fusion_passes.graph.collectives import ALL_REDUCE, WAIT
from fusion_passes.graph.text import graph_text
from fusion_passes.passes.later import ReduceLater
from fusion_passes.reductions.find import find_gradient_reductions
from testing.graphs import Backward, TensorSpec, groups_of, pipeline, reduce, tensor, trace


def _read_twice(y):
    """A gradient whose launch has two readers."""
    launch = ALL_REDUCE(torch.div(torch.sin(y), 2), "sum", "ddp0#w2")
    return WAIT(launch), torch.abs(launch)


def _fused(backward: Backward, *inputs: TensorSpec) -> str:
    graph = trace(backward, list(inputs)).graph
    assert pipeline("concat")(graph)(graph)
    return graph_text(graph)


def test_it_is_said_before_the_first_launch_and_launched_no_more() -> None:
    assert_expected_inline(
        _fused(lambda x, y: (reduce(torch.neg(x), "w1"), *_read_twice(y)), tensor(4), tensor(4)),
        """\
x_1: f32[4]
y_1: f32[4]
neg: f32[4] = neg(x_1)
pack_default: f32[4] = pack([neg], [0], [1], torch.float32, 'div', 2.0, False, '9bf50b81ecf3ce3d:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; sum float32 1; later sum float32 2')
all_reduce_default: f32[4] = all_reduce(pack_default, 'sum', 'ddp0')
sin: f32[4] = sin(y_1)
div_1: f32[4] = div(sin, 2)
abs_1: f32[4] = abs(div_1)
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: f32[4] = control_deps((all_reduce_default), pinned_wait_tensor_default, all_reduce_default)
as_strided_default: f32[4] = as_strided(pinned_wait_tensor_default_1, [4], [1], 0)
return (as_strided_default, div_1, abs_1)
""",
    )


def test_a_module_may_have_nothing_else() -> None:
    assert_expected_inline(
        _fused(_read_twice, tensor(4)),
        """\
y_1: f32[4]
sin: f32[4] = sin(y_1)
div: f32[4] = div(sin, 2)
agree__default: ? = agree_(div, 'ddp0', 'concat; later sum float32 2')
abs_1: f32[4] = abs(div)
return (div, abs_1)
""",
    )


def test_others_collectives_stay() -> None:
    def backward(x):
        launch = ALL_REDUCE(x, "sum", "tensor parallel")
        return WAIT(launch), torch.abs(launch)

    text = _fused(lambda x, y: (reduce(y, "w1"), *backward(x)), tensor(4), tensor(4))
    assert "all_reduce(x_1, 'sum', 'tensor parallel')" in text
    assert "later" not in text


def test_what_has_been_divided_is_known() -> None:
    def backward(x, y):
        averaged = ALL_REDUCE(x, "avg", "ddp0#w1")
        return WAIT(averaged), torch.abs(averaged), *_read_twice(y)

    graph = trace(backward, [tensor(4), tensor(4)]).graph
    first, second = find_gradient_reductions(graph, groups_of(graph)).rejections
    assert first.later() == Collective("by", "float32", (1,), 0)
    assert second.later() == Collective("before", "float32", (2,), 0)
    assert ReduceLater.of([first, second])(graph)
    assert not ReduceLater.of([])(graph)
