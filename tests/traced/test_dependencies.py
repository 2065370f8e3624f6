"""Dependencies between nodes, and orders that respect them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE, WAIT
from fusion_passes.traced.dependencies import dependents, reorder, written_arguments
from tests.support.graphs import Backward, assert_same_numbers, execute, tensor, trace

_aten = torch.ops.aten


def test_what_depends_on_some_nodes() -> None:
    def backward(x):
        a = torch.neg(x)
        b = torch.abs(a)
        return torch.sin(x), torch.add(b, x)

    graph = trace(backward, [tensor(4)]).graph
    (neg,) = graph.find_nodes(op="call_function", target=_aten.neg.default)
    found = [node.name for node in graph.nodes if node in dependents(graph, {neg})]
    assert found == ["neg", "abs_1", "add", "output"]


def test_what_is_read_after_a_write_depends_on_what_was_written() -> None:
    def backward(x, grad, other):
        before = torch.sin(grad)
        grad.view(2, 2).copy_(torch.neg(x).view(2, 2))
        other.zero_()
        return before, torch.cos(grad), torch.abs(other)

    graph = trace(backward, [tensor(4)] * 3).graph
    (neg,) = graph.find_nodes(op="call_function", target=_aten.neg.default)
    found = {node.name for node in dependents(graph, {neg})}
    assert {"neg", "cos"} <= found
    assert not {"sin", "abs_1", "zero_"} & found


# --- Reordering --------------------------------------------------------------------------------


def _order(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def _keys(module: fx.GraphModule, **wanted: float) -> dict[fx.Node, tuple[float, ...]]:
    """The current positions of the nodes as sort keys, except of the named ones."""
    return {
        node: (wanted.get(node.name, position),) for position, node in enumerate(module.graph.nodes)
    }


def _three(x, y):
    return torch.neg(x), torch.abs(y), torch.sin(x)


def test_no_node_moves_without_reason_and_ties_keep_the_order_that_was() -> None:
    module = trace(_three, [tensor(4)] * 2)
    before = list(module.graph.nodes)
    assert not reorder(module.graph, _keys(module))
    assert not reorder(module.graph, dict.fromkeys(module.graph.nodes, (0,)))
    assert list(module.graph.nodes) == before


def test_a_node_moves_to_its_key() -> None:
    module = trace(_three, [tensor(4)] * 2)
    assert reorder(module.graph, _keys(module, neg=3.5))
    assert _order(module) == ["abs_1", "neg", "sin"]


def test_chains_keep_their_order() -> None:
    module = trace(_three, [tensor(4)] * 2)
    neg, absolute, sin = [node for node in module.graph.nodes if node.op == "call_function"]
    assert reorder(module.graph, _keys(module, sin=-1), [[sin, neg]])
    assert _order(module) == ["sin", "neg", "abs_1"]
    reorder(module.graph, _keys(module, abs_1=-1), [[sin, neg], [neg, absolute]])
    assert _order(module) == ["sin", "neg", "abs_1"]


def test_a_circle_is_an_error_that_names_a_node() -> None:
    module = trace(lambda x: torch.sin(torch.neg(x)), [tensor(4)])
    neg, sin = [node for node in module.graph.nodes if node.op == "call_function"]
    with pytest.raises(ValueError, match="circle, neg among them"):
        reorder(module.graph, _keys(module), [[sin, neg]])


# --- Writes ------------------------------------------------------------------------------------


def _write_between_reads(x, y):
    before = torch.neg(x)
    x.copy_(y)
    return before, torch.sin(y)


def test_a_read_moves_behind_a_later_write_of_other_memory() -> None:
    """The deterministic version of the random programs below."""
    module = trace(_write_between_reads, [tensor(4)] * 2)
    (neg,) = module.graph.find_nodes(op="call_function", target=_aten.neg.default)
    x, y = module.graph.find_nodes(op="placeholder")
    neg.replace_input_with(x, y)
    reorder(module.graph, _keys(module, neg=3.5))
    assert _order(module) == ["copy_", "neg", "sin"]


def test_writes_of_the_same_memory_keep_their_order() -> None:
    def function(x, y, z):
        x.copy_(y)
        x.copy_(z)

    module = trace(function, [tensor(4)] * 3)
    first, second = [node for node in module.graph.nodes if node.op == "call_function"]
    second.replace_input_with(first, first.args[0])
    assert not reorder(module.graph, _keys(module, copy__1=-1))


def test_which_arguments_are_written() -> None:
    def function(x, y, z):
        x.copy_(y)
        torch._foreach_add_([y, z], 1)
        return torch.neg(z)

    module = trace(function, [tensor(4)] * 3)
    written = {
        node.name: [argument.name for argument in written_arguments(node)]
        for node in module.graph.nodes
        if written_arguments(node)
    }
    assert set(written) == {"copy_", "_foreach_add_"}
    assert written["copy_"] == ["x_1"]
    assert written["_foreach_add_"] == ["y_1", "z_1"]


# --- Properties --------------------------------------------------------------------------------


def _random_program(seed: int) -> Backward:
    def program(x, y, z):
        choose = random.Random(seed)
        values = [x, y, z]
        for _ in range(10):
            one, other = choose.choice(values), choose.choice(values)
            step = choose.choice(["add", "neg", "view", "write", "reduce"])
            if step == "write":
                choose.choice([x, y, z]).copy_(torch.neg(one))
            elif step == "view":
                values.append(_aten.slice.Tensor(one, 0, 0, 4))
            elif step == "reduce":
                values.append(WAIT(ALL_REDUCE(one, "sum", "other")))
            else:
                values.append(torch.add(one, other) if step == "add" else torch.neg(one))
        return tuple(values[3:])

    return program


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_any_order_that_is_asked_for_means_the_same(program: int, order: int) -> None:
    module = trace(_random_program(program), [tensor(4)] * 3)
    numbers = execute(module)
    choose = random.Random(order)
    moved = list(module.graph.nodes)
    keys = {node: (choose.random(),) for node in moved}
    keys[moved[-1]] = (1.0,)  # A graph ends with its output node.
    assert reorder(module.graph, keys) == (list(module.graph.nodes) != moved)
    module.graph.lint()
    assert_same_numbers(numbers, execute(module))
    assert not reorder(module.graph, keys)
