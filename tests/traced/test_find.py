"""Which collectives are DDP's gradient reductions, and the reasons for the others."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT, all_reduce
from fusion_passes.traced.find import GradientReduction
from tests.support.graphs import Backward, TensorSpec, cast, find, reduce, tensor, trace

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional


def _path(reduction: GradientReduction) -> str:
    """The gradient, the nodes of the reduction, and its readers."""
    path = " -> ".join(node.name for node in (reduction.gradient, *reduction.nodes))
    text = f"{path} -> [{', '.join(node.name for node in reduction.wait.users)}]"
    return text.replace("convert_element_type", "cast")


def _what(reduction: GradientReduction) -> str:
    return f"{reduction.key}, {reduction.num_bytes} bytes, strides {list(reduction.strides)}"


def _rejections(graph: fx.Graph) -> list[str]:
    """The rejection reason of each collective, in a graph in which all are rejected."""
    found = find(graph)
    assert found.reductions == ()
    # Torch numbers symbols.
    return [f"{r.node.name}: " + re.sub(r"\bs\d+\b", "s", r.reason) for r in found.rejections]


def _only(function: Backward, inputs: Sequence[TensorSpec]) -> GradientReduction:
    found = find(trace(function, inputs).graph)
    assert found.rejections == ()
    (reduction,) = found.reductions
    return reduction


def test_where_a_reduction_is_and_whose() -> None:
    def backward(x):
        return all_reduce(x, "sum", "ddp0"), reduce(torch.neg(x), "w", module="ddp2")

    lines = []
    for reduction in find(trace(backward, [tensor(4)]).graph).reductions:
        owner = reduction.owner
        lines += [_path(reduction), f"    {_what(reduction)}, at {reduction.position}"]
        lines.append(f"    {owner.module} {owner.parameter} in {owner.process_group}\n")
    assert_expected_inline(
        "\n".join(lines),
        """\
neg -> div -> all_reduce_1 -> wait_tensor_1 -> [output]
    sum(gradient / 2) float32 cpu on ddp2, 16 bytes, strides [1], at 5
    DDP2 w in pairs
""",
    )


# --- What is part of a reduction, and what only stands beside it -------------------------------

ROW, SQUARE = [tensor(4)], [tensor(2, 3)]


def _unused(x):
    reduce(x, "w")
    return torch.neg(x)


FORMS: list[tuple[str, Backward, list[TensorSpec], str, str]] = [
    (
        "a new grad",
        lambda x: reduce(torch.neg(x), "w"),
        SQUARE,
        "neg -> div -> all_reduce -> wait_tensor -> [output]",
        "sum(gradient / 2) float32 cpu on ddp0, 24 bytes, strides [3, 1]",
    ),
    (
        "a cast before is the gradient's own",
        lambda x: reduce(cast(torch.neg(x), torch.bfloat16), "w"),
        ROW,
        "cast -> div -> all_reduce -> wait_tensor -> [output]",
        "sum(gradient / 2) bfloat16 cpu on ddp0, 8 bytes, strides [1]",
    ),
    (
        "a cast after is none of its",
        lambda x: cast(reduce(torch.neg(x), "w"), torch.float64),
        ROW,
        "neg -> div -> all_reduce -> wait_tensor -> [cast]",
        "sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1]",
    ),
    (
        "a result that is not used",
        _unused,
        ROW,
        "x_1 -> div -> all_reduce -> wait_tensor -> []",
        "sum(gradient / 2) float32 cpu on ddp0, 16 bytes, strides [1]",
    ),
]


@pytest.mark.parametrize(
    ("backward", "inputs", "path", "what"), [pytest.param(*form, id=name) for name, *form in FORMS]
)
def test_forms(backward: Backward, inputs: list[TensorSpec], path: str, what: str) -> None:
    reduction = _only(backward, inputs)
    assert (_path(reduction), _what(reduction)) == (path, what)


def test_arguments_may_be_given_by_name() -> None:
    module = trace(lambda x: reduce(x, "w", divide=None), ROW)
    (start,) = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    start.args, start.kwargs = start.args[:1], {"reduce_op": "sum", "group_name": "ddp0#w"}
    (reduction,) = find(module.graph).reductions
    assert _path(reduction) == "x_1 -> all_reduce -> wait_tensor -> [output]"
    assert str(reduction.key) == "sum(gradient) float32 cpu on ddp0"


# --- What is a division by the number of ranks, and what only looks like one -------------------


def _read_by_others(x):
    half = torch.div(x, 2)
    return reduce(half, "w", divide=None), half


@pytest.mark.parametrize(
    ("backward", "divisor"),
    [
        (lambda x: reduce(x, "w", divide=3), 3),
        (lambda x: reduce(x, "w", divide=None), 1),
        pytest.param(
            lambda x: reduce(torch.div(x, torch.neg(x)), "w", divide=None), 1, id="by a tensor"
        ),
        pytest.param(
            lambda x: reduce(x.div(2, rounding_mode="floor"), "w", divide=None), 1, id="rounded"
        ),
        pytest.param(lambda x: reduce(torch.mul(x, 2), "w", divide=None), 1, id="a product"),
        pytest.param(_read_by_others, 1, id="read by others"),
    ],
)
def test_divisions(backward: Backward, divisor: float) -> None:
    reduction = _only(backward, ROW)
    assert reduction.key.divisor == divisor
    assert (reduction.nodes[0] is not reduction.start) == (divisor != 1)


# --- What is left alone, and the sentence that says why ----------------------------------------

NO_MODULE = "belongs to no DistributedDataParallel module that was constructed under ddp_fusion"


def _on_groups_that_are_no_modules(x):
    tensor_parallel = all_reduce(torch.neg(x), "sum", "tensor_parallel")
    # A user's own average looks like DDP's except for the group name, on any group.
    own = all_reduce(torch.div(x, 2), "sum", "world")
    return tensor_parallel, own


def _of_another_kind(x):
    gathered = WAIT(_functional.all_gather_into_tensor(x, 4, "ddp0"))
    many = _functional.all_reduce_coalesced([x, torch.neg(x)], "sum", "ddp0#w")
    return gathered, WAIT(many[0]), WAIT(many[1])


def _read_before_its_wait(x):
    launched = ALL_REDUCE(x, "sum", "ddp0#w")
    return WAIT(launched), torch.neg(launched)


def _waited_for_twice(x):
    launched = ALL_REDUCE(x, "sum", "ddp0#w")
    return WAIT(launched), WAIT(launched)


@pytest.mark.parametrize(
    ("backward", "reasons"),
    [
        (lambda x: cast(torch.neg(x), torch.float64), []),
        (
            _on_groups_that_are_no_modules,
            [
                f"all_reduce: group 'tensor_parallel' {NO_MODULE}",
                f"all_reduce_1: group 'world' {NO_MODULE}",
            ],
        ),
        (
            _of_another_kind,
            [
                "all_gather_into_tensor: it is not an all-reduce of one tensor, on group 'ddp0'",
                "all_reduce_coalesced: it is not an all-reduce of one tensor, on group 'ddp0#w'",
            ],
        ),
        (
            lambda x: WAIT(ALL_REDUCE_IN_PLACE(torch.neg(x), "sum", "ddp0#w")),
            ["all_reduce_: it is an in-place all-reduce"],
        ),
        (
            lambda x: reduce(x, "w", op="max"),
            ["all_reduce: its reduce op is max, not sum"],
        ),
        (
            _read_before_its_wait,
            ["all_reduce: its result is read by wait_tensor, neg, not by a single wait"],
        ),
        (
            _waited_for_twice,
            ["all_reduce: its result is read by wait_tensor, wait_tensor_1, not by a single wait"],
        ),
        (
            lambda x: ALL_REDUCE(x, "sum", "ddp0#w"),
            ["all_reduce: its result is read by output, not by a single wait"],
        ),
    ],
)
def test_what_is_left_alone(backward: Backward, reasons: list[str]) -> None:
    assert _rejections(trace(backward, ROW).graph) == reasons


def test_a_symbolic_shape() -> None:
    module = trace(lambda x: reduce(x, "w"), [tensor(5, 4)], symbolic=True)
    assert _rejections(module.graph) == [
        "all_reduce: its shape (s, s) is symbolic, unlike a parameter's shape"
    ]


def test_a_complex_gradient() -> None:
    module = trace(lambda x: reduce(x, "w"), [tensor(4, dtype=torch.complex64)])
    assert _rejections(module.graph) == [
        "all_reduce: its dtype is complex64, and complex gradients are not traced"
    ]


def test_what_a_graph_does_not_say() -> None:
    module = trace(lambda x: reduce(x, "w", divide=None), ROW)
    (start,) = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    del start.meta["val"]
    assert _rejections(module.graph) == ["all_reduce: its node has no metadata of a dense tensor"]
    start.args = (start.args[0], start.args[1], object())
    assert _rejections(module.graph) == ["all_reduce: its process group is not given by name"]
