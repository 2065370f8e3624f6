"""Which node's kernel stores a gradient, and how it must store it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._dispatch.python import enable_python_dispatcher

from fusion_passes.traced.producers import source_of
from tests.support.graphs import Backward, TensorSpec, cast, find, reduce, tensor, trace

_aten = torch.ops.aten


def source(
    function: Backward, *inputs: TensorSpec, sent_as: torch.dtype | None = None
) -> tuple[str, tuple[int, ...]]:
    """Name of the node and strides for the gradient that a function reduces."""
    module = trace(function, inputs)
    (reduction,) = find(module.graph).reductions
    found = source_of(reduction, sent_as)
    return found.node.name, tuple(found.strides)


def test_a_gradient_that_is_no_view() -> None:
    assert source(lambda x: reduce(torch.neg(x), "w"), tensor(2, 3)) == ("neg", (3, 1))


def test_a_transposed_product_is_stored_transposed() -> None:
    def backward(x, y):
        return reduce(_aten.permute.default(torch.mm(x, y), [1, 0]), "w")

    assert source(backward, tensor(2, 5), tensor(5, 3)) == ("mm", (1, 2))


def test_dimensions_that_turn_round() -> None:
    """For a gradient [4, 2, 3] with strides (6, 3, 1), the source is [2, 3, 4]."""

    def backward(x):
        return reduce(_aten.permute.default(torch.neg(x), [2, 0, -2]), "w")

    assert source(backward, tensor(2, 3, 4)) == ("neg", (3, 1, 6))


def test_a_chain_of_shapes() -> None:
    def backward(x):
        row = _aten.squeeze.dim(_aten.unsqueeze.default(torch.neg(x), 0), 0)
        return reduce(torch.reshape(_aten.permute.default(row, [1, 0]), [3, 1, 2]), "w")

    assert source(backward, tensor(2, 3)) == ("neg", (1, 2))


def test_a_shape_that_would_need_other_strides_is_no_view() -> None:
    """The result is in channels-last order, which no shape of the source expresses."""

    def backward(x):
        return reduce(torch.reshape(torch.neg(x), [2, 3, 2, 2]), "w")

    (reduction,) = find(trace(backward, [tensor(2, 12)]).graph).reductions
    assert source_of(replace(reduction, strides=(12, 1, 6, 3))).node.name == "view"


def test_what_somebody_else_reads_is_not_looked_behind() -> None:
    def other_reads_gradient(x):
        gradient = torch.reshape(torch.neg(x), [6])
        return reduce(gradient, "w"), torch.abs(gradient)

    def other_reads_source(x):
        value = torch.neg(x)
        return reduce(torch.reshape(value, [6]), "w"), torch.abs(value)

    assert source(other_reads_gradient, tensor(2, 3))[0] == "view"
    assert source(other_reads_source, tensor(2, 3))[0] == "view"


def test_what_repeats_elements_is_no_view_of_them() -> None:
    def backward(x):
        return reduce(_aten.expand.default(torch.neg(x), [2, 3]), "w")

    assert source(backward, tensor(3))[0] == "expand"


def test_what_is_no_view_of_it_is_not_looked_behind() -> None:
    """This also holds if torch calls Python's operators, whose errors have another type."""

    def backward(x):
        return reduce(torch.reshape(torch.neg(x), [8, 2, 4, 1]).permute(1, 2, 0, 3), "w")

    (reduction,) = find(trace(backward, [tensor(1, 8, 8)]).graph).reductions
    relaid = replace(reduction, strides=(1, 16, 2, 16))
    assert source_of(relaid).node.name == "view"
    with enable_python_dispatcher():
        assert source_of(relaid).node.name == "view"


def test_an_input_can_be_the_source() -> None:
    assert source(lambda x: reduce(torch.reshape(x, [6]), "w"), tensor(2, 3)) == ("x_1", (3, 1))


def test_a_cast_from_the_dtype_that_is_sent_is_looked_through() -> None:
    def backward(x):
        return reduce(cast(torch.neg(x), torch.float32), "w")

    bf16 = tensor(4, dtype=torch.bfloat16)
    assert source(backward, bf16, sent_as=torch.bfloat16)[0] == "neg"
    assert source(backward, bf16, sent_as=torch.float16)[0] == "convert_element_type"
    assert source(backward, bf16)[0] == "convert_element_type"
