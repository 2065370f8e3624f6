# ruff: noqa: E501  (a golden has one line for each node)
"""Which collectives are DDP's gradient reductions, and what is said about the others."""

from __future__ import annotations

import re
import textwrap
from typing import Any, Final

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT, all_reduce
from fusion_passes.graph.scaling import Scaling
from fusion_passes.reductions.find import GradientReduction
from testing.graphs import (
    Backward,
    TensorSpec,
    cast,
    find,
    reduce,
    reduce_as,
    reduce_into,
    reduce_relaid,
    tensor,
    trace,
)

_functional = torch.ops._c10d_functional
_INDENT: Final[dict[str, Any]] = {"initial_indent": "    ", "subsequent_indent": "    "}


def _find(function: Backward, *inputs: TensorSpec) -> str:
    """The reductions and rejections of a graph as text."""
    return _describe(trace(function, inputs))


def _describe(module: fx.GraphModule) -> str:
    found = find(module.graph)
    lines = [_line(reduction) for reduction in found.reductions]
    for rejection in found.rejections:
        # Symbols are numbered by torch.
        reason = re.sub(r"\bs\d+\b", "s", rejection.reason)
        lines += [f"left alone: {rejection.node.name}", *textwrap.wrap(reason, 90, **_INDENT)]
    return "\n".join(lines) + "\n"


def _line(reduction: GradientReduction) -> str:
    path = " -> ".join(node.name for node in (reduction.gradient, *reduction.nodes))
    users = ", ".join(node.name for node in reduction.result.users)
    strides = list(reduction.strides)
    owner = reduction.owner
    return (
        f"{path} -> [{users}]\n"
        f"    {reduction.key}, {reduction.num_bytes} bytes, strides {strides}, "
        f"at {reduction.position}\n"
        f"    {owner.module} {owner.parameter} in {owner.process_group}"
    )


def test_a_new_grad() -> None:
    assert_expected_inline(
        _find(lambda x: reduce(torch.neg(x), "w"), tensor(2, 3)),
        """\
neg -> div -> all_reduce -> wait_tensor -> [output]
    sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [3, 1], at 3
    DDP0 w in world
""",
    )


def test_an_existing_grad_is_copied_into() -> None:
    assert_expected_inline(
        _find(lambda g, x: reduce_into(g, torch.neg(x), "w"), tensor(4), tensor(4)),
        """\
add -> div -> all_reduce -> wait_tensor -> [copy_]
    sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1], at 5
    DDP0 w in world
""",
    )


def test_a_multiplication_by_the_reciprocal_is_a_scaling_of_its_own() -> None:
    assert_expected_inline(
        _find(lambda x: reduce(torch.neg(x), "w", multiply=0.5), tensor(4)),
        """\
neg -> mul -> all_reduce -> wait_tensor -> [output]
    sum(gradient * 0.5) float32 cpu on ddp0, 16 bytes, strides [1], at 3
    DDP0 w in world
""",
    )


def test_avg_needs_no_scaling() -> None:
    assert_expected_inline(
        _find(lambda x: reduce(torch.neg(x), "w", op="avg", divide=None), tensor(4)),
        """\
neg -> all_reduce -> wait_tensor -> [output]
    avg(gradient) float32 cpu on ddp0, 16 bytes, strides [1], at 2
    DDP0 w in world
""",
    )


def test_casts_of_a_compress_hook_are_part_of_it() -> None:
    assert_expected_inline(
        _find(lambda x: reduce_as(torch.neg(x), "w", torch.bfloat16), tensor(4)),
        """\
neg -> convert_element_type -> div -> all_reduce -> wait_tensor -> convert_element_type_1 -> [output]
    sum(gradient / 2) float32 as bfloat16 cpu on ddp0, 16 bytes, strides [1], at 4
    DDP0 w in world
""",
    )


def test_a_cast_before_that_is_not_undone_after_is_the_gradients_own() -> None:
    assert_expected_inline(
        _find(lambda x: reduce(cast(torch.neg(x), torch.bfloat16), "w"), tensor(4)),
        """\
convert_element_type -> div -> all_reduce -> wait_tensor -> [output]
    sum(gradient / 2) bfloat16 cpu on ddp0, 8 bytes, strides [1], at 4
    DDP0 w in world
""",
    )


def test_a_cast_after_that_undoes_none_stays_outside() -> None:
    assert_expected_inline(
        _find(lambda x: cast(reduce(torch.neg(x), "w"), torch.float64), tensor(4)),
        """\
neg -> div -> all_reduce -> wait_tensor -> [convert_element_type]
    sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1], at 3
    DDP0 w in world
""",
    )


def test_a_cast_that_is_undone_to_another_dtype_stays_outside() -> None:
    def backward(x):
        return cast(reduce(cast(torch.neg(x), torch.bfloat16), "w"), torch.float64)

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
convert_element_type -> div -> all_reduce -> wait_tensor -> [convert_element_type_1]
    sum(gradient / 2) bfloat16 cpu on ddp0, 8 bytes, strides [1], at 4
    DDP0 w in world
""",
    )


def test_a_result_that_others_read_uncast_stays_as_it_is_sent() -> None:
    def backward(x):
        sent = reduce(cast(torch.neg(x), torch.bfloat16), "w")
        return sent, cast(sent, torch.float32)

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
convert_element_type -> div -> all_reduce -> wait_tensor -> [convert_element_type_1, output]
    sum(gradient / 2) bfloat16 cpu on ddp0, 8 bytes, strides [1], at 4
    DDP0 w in world
""",
    )


def test_a_change_of_layout_after_the_wait_is_part_of_it() -> None:
    assert_expected_inline(
        _find(lambda x: reduce_relaid(torch.neg(x), "w"), tensor(2, 3, stride=(1, 2))),
        """\
neg -> div -> all_reduce -> wait_tensor -> copy -> [output]
    sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [1, 2], at 3
    DDP0 w in world
""",
    )


def test_an_empty_tensor_that_only_gives_the_layout_is_part_of_it_too() -> None:
    def backward(x):
        gradient = torch.neg(x)
        layout = torch.ops.aten.new_empty_strided.default(gradient, [2, 3], [1, 2])
        return torch.ops.aten.copy.default(layout, reduce(gradient, "w"))

    assert_expected_inline(
        _find(backward, tensor(2, 3)),
        """\
neg -> new_empty_strided -> div -> all_reduce -> wait_tensor -> copy -> [output]
    sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [1, 2], at 4
    DDP0 w in world
""",
    )


def test_a_layout_that_is_not_dense_stays_outside() -> None:
    def backward(x):
        layout = torch.ops.aten.new_empty_strided.default(x, [2, 3], [8, 1])
        return torch.ops.aten.copy.default(layout, reduce(torch.neg(x), "w"))

    assert_expected_inline(
        _find(backward, tensor(2, 3)),
        """\
neg -> div -> all_reduce -> wait_tensor -> [copy]
    sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [3, 1], at 4
    DDP0 w in world
""",
    )


def test_an_existing_grad_says_how_the_result_lies() -> None:
    def backward(grad, x):
        grad.copy_(reduce(torch.add(grad, x), "w"))

    assert_expected_inline(
        _find(backward, tensor(2, 3, stride=(1, 2)), tensor(2, 3)),
        """\
add -> div -> all_reduce -> wait_tensor -> [copy_]
    sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [1, 2], at 4
    DDP0 w in world
""",
    )


def test_complex_scalar_and_empty_gradients() -> None:
    def backward(x, y, z):
        return reduce(x, "complex"), reduce(y, "scalar"), reduce(z, "empty")

    assert_expected_inline(
        _find(backward, tensor(4, dtype=torch.complex64), tensor(), tensor(0, 4)),
        """\
x_1 -> div -> all_reduce -> wait_tensor -> [output]
    sum(gradient / 2) complex64 cpu on ddp0, 32 bytes, strides [1], at 4
    DDP0 complex in world
y_1 -> div_1 -> all_reduce_1 -> wait_tensor_1 -> [output]
    sum(gradient / 2) float32 cpu on ddp0, 4 bytes, strides [], at 7
    DDP0 scalar in world
z_1 -> div_2 -> all_reduce_2 -> wait_tensor_2 -> [output]
    sum(gradient / 2) float32 cpu on ddp0, 0 bytes, strides [4, 1], at 10
    DDP0 empty in world
""",
    )


def test_the_result_may_be_unused_or_read_often() -> None:
    def backward(x):
        reduce(x, "unused")
        twice = reduce(torch.neg(x), "twice")
        return twice, torch.abs(twice)

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
x_1 -> div -> all_reduce -> wait_tensor -> []
    sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1], at 2
    DDP0 unused in world
neg -> div_1 -> all_reduce_1 -> wait_tensor_1 -> [abs_1, output]
    sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1], at 6
    DDP0 twice in world
""",
    )


def test_groups_without_a_parameter_and_other_modules() -> None:
    def backward(x):
        return all_reduce(x, "sum", "ddp0"), reduce(torch.neg(x), "w", module="ddp2")

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
x_1 -> all_reduce -> wait_tensor -> [output]
    sum(gradient) float32 cpu on ddp0, 16 bytes, strides [1], at 1
    DDP0 ? in world
neg -> div -> all_reduce_1 -> wait_tensor_1 -> [output]
    sum(gradient / 2) float32 cpu on ddp2, 16 bytes, strides [1], at 5
    DDP2 w in pairs
""",
    )


# --- What is a scaling, and what only looks like one -------------------------------------------


def _scaling(function: Backward, *inputs: TensorSpec) -> Scaling:
    (reduction,) = find(trace(function, inputs).graph).reductions
    is_scaled = reduction.nodes[0] is not reduction.start
    assert is_scaled == (reduction.key.scaling != Scaling("none"))
    return reduction.key.scaling


@pytest.mark.parametrize(
    ("divide", "multiply", "expected"),
    [
        (3, None, Scaling("div", 3.0)),
        (2.5, None, Scaling("div", 2.5)),
        (None, 0.25, Scaling("mul", 0.25)),
        (None, None, Scaling("none")),
    ],
)
def test_scalings(divide: float | None, multiply: float | None, expected: Scaling) -> None:
    actual = _scaling(
        lambda x: reduce(torch.neg(x), "w", divide=divide, multiply=multiply), tensor(4)
    )
    assert actual == expected


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(lambda x: torch.div(x, torch.neg(x)), id="by a tensor"),
        pytest.param(lambda x: torch.div(x, 2, rounding_mode="floor"), id="with rounding"),
        pytest.param(lambda x: torch.mul(x, float("inf")), id="by infinity"),
        pytest.param(lambda x: torch.add(x, 2), id="an addition"),
    ],
)
def test_what_only_looks_like_a_scaling(scale: Backward) -> None:
    assert _scaling(lambda x: reduce(scale(x), "w", divide=None), tensor(4)) == Scaling("none")


def test_a_scaled_value_that_somebody_else_reads_is_the_gradient_itself() -> None:
    def backward(x):
        half = torch.div(x, 2)
        return reduce(half, "w", divide=None), half

    assert _scaling(backward, tensor(4)) == Scaling("none")


def test_a_scaling_that_changes_the_dtype_is_not_one() -> None:
    scaling = _scaling(
        lambda x: reduce(torch.div(x, 2), "w", divide=None), tensor(4, dtype=torch.int32)
    )
    assert scaling == Scaling("none")


# --- What is left alone, and the sentence that says why ----------------------------------------


def test_groups_that_are_no_modules() -> None:
    def backward(x):
        tensor_parallel = all_reduce(torch.neg(x), "sum", "tensor_parallel")
        # A user's own average over another group looks like DDP's in all but the name.
        own = all_reduce(torch.div(x, 2), "sum", "own")
        # So does one over the group that a DDP module has too.
        same_group = all_reduce(torch.div(x, 2), "sum", "world")
        return tensor_parallel, own, same_group

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
left alone: all_reduce
    group 'tensor_parallel' belongs to no DistributedDataParallel module that was
    constructed under ddp_fusion
left alone: all_reduce_1
    group 'own' belongs to no DistributedDataParallel module that was constructed under
    ddp_fusion
left alone: all_reduce_2
    group 'world' belongs to no DistributedDataParallel module that was constructed under
    ddp_fusion
""",
    )


def test_collectives_of_another_kind() -> None:
    def backward(x):
        gathered = WAIT(_functional.all_gather_into_tensor(x, 4, "ddp0"))
        many = _functional.all_reduce_coalesced([x, torch.neg(x)], "sum", "ddp0#w")
        return gathered, WAIT(many[0]), WAIT(many[1])

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
left alone: all_gather_into_tensor
    a collective of another kind, on group 'ddp0'
left alone: all_reduce_coalesced
    a collective of another kind, on group 'ddp0#w'
""",
    )


def test_an_all_reduce_in_place() -> None:
    assert_expected_inline(
        _find(lambda x: WAIT(ALL_REDUCE_IN_PLACE(torch.neg(x), "sum", "ddp0#w")), tensor(4)),
        """\
left alone: all_reduce_
    an in-place all-reduce
""",
    )


def test_an_all_reduce_by_another_operation() -> None:
    assert_expected_inline(
        _find(lambda x: reduce(x, "w", op="max"), tensor(4)),
        """\
left alone: all_reduce
    reduces by max, not by sum or avg
""",
    )


def test_a_result_that_is_read_before_it_is_waited_for() -> None:
    def backward(x):
        launched = ALL_REDUCE(x, "sum", "ddp0#w")
        return WAIT(launched), torch.neg(launched)

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
left alone: all_reduce
    its result is read by wait_tensor, neg, not by one wait alone
""",
    )


def test_a_result_that_is_waited_for_twice() -> None:
    def backward(x):
        launched = ALL_REDUCE(x, "sum", "ddp0#w")
        return WAIT(launched), WAIT(launched)

    assert_expected_inline(
        _find(backward, tensor(4)),
        """\
left alone: all_reduce
    its result is read by wait_tensor, wait_tensor_1, not by one wait alone
""",
    )


def test_a_result_that_nobody_waits_for() -> None:
    assert_expected_inline(
        _find(lambda x: ALL_REDUCE(x, "sum", "ddp0#w"), tensor(4)),
        """\
left alone: all_reduce
    its result is read by output, not by one wait alone
""",
    )


def test_a_symbolic_shape() -> None:
    module = trace(lambda x: reduce(x, "w"), [tensor(5, 4)], symbolic=True)
    assert_expected_inline(
        _describe(module),
        """\
left alone: all_reduce
    its shape (s, s) is symbolic, but a parameter's is fixed
""",
    )


def test_a_graph_without_fake_values() -> None:
    module = trace(lambda x: reduce(x, "w", divide=None), [tensor(4)])
    (start,) = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    del start.meta["val"]
    assert_expected_inline(
        _describe(module),
        """\
left alone: all_reduce
    the graph does not say that it is a dense tensor
""",
    )


def test_a_group_that_is_given_as_an_object() -> None:
    module = trace(lambda x: reduce(x, "w"), [tensor(4)])
    (start,) = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    start.args = (start.args[0], start.args[1], object())
    assert_expected_inline(
        _describe(module),
        """\
left alone: all_reduce
    its process group is not given by name
""",
    )


def test_arguments_may_be_given_by_name() -> None:
    module = trace(lambda x: reduce(x, "w", divide=None), [tensor(4)])
    (start,) = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    start.args, start.kwargs = start.args[:1], {"reduce_op": "sum", "group_name": "ddp0#w"}
    assert_expected_inline(
        _describe(module),
        """\
x_1 -> all_reduce -> wait_tensor -> [output]
    sum(gradient) float32 cpu on ddp0, 16 bytes, strides [1], at 1
    DDP0 w in world
""",
    )


def test_a_graph_without_collectives() -> None:
    found = find(trace(lambda x: cast(torch.neg(x), torch.float64), [tensor(4)]).graph)
    assert (found.reductions, found.rejections) == ((), ())
