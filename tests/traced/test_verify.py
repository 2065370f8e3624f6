"""Each invariant, broken on purpose, and the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE, WAIT, all_reduce
from fusion_passes.traced.verify import BrokenInvariantError, GraphFacts, graph_facts, verify
from tests.support.graphs import chain, coalesced, concat, groups_of, pin, reduce, tensor, trace

_aten = torch.ops.aten


def _backward(x, y):
    a = reduce(torch.neg(x), "a")
    foreign = all_reduce(torch.neg(y), "max", "other")
    return a, foreign, reduce(torch.abs(y), "b")


def _traced() -> tuple[fx.Graph, GraphFacts]:
    module = trace(_backward, [tensor(2, 3), tensor(4)])
    module.graph.owning_module = module
    return module.graph, graph_facts(module.graph, groups_of(module.graph))


def _node(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def _return_other_values(graph: fx.Graph) -> None:
    output: Any = graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)


def _return_fewer_values(graph: fx.Graph) -> None:
    output: Any = graph.output_node()
    output.args = (output.args[0][:2],)


def _drop_a_reduction(graph: fx.Graph, suffix: str = "") -> None:
    wait = _node(graph, f"wait_tensor{suffix}")
    wait.replace_all_uses_with(_node(graph, f"neg{suffix}"))
    graph.erase_node(wait)
    graph.erase_node(_node(graph, f"all_reduce{suffix}"))


def _reduce_twice(graph: fx.Graph) -> None:
    wait = _node(graph, "wait_tensor")
    with graph.inserting_after(wait):
        again = graph.call_function(ALL_REDUCE, (wait, "sum", "ddp0#a"))
        again.meta["val"] = wait.meta["val"]
    with graph.inserting_after(again):
        graph.call_function(WAIT, (again,)).meta["val"] = wait.meta["val"]


def _reduce_on_another_group(graph: fx.Graph) -> None:
    start = _node(graph, "all_reduce")
    start.args = (*start.args[:2], "ddp2#a")


def _reduce_by_another_operation(graph: fx.Graph) -> None:
    start = _node(graph, "all_reduce")
    start.args = (start.args[0], "avg", start.args[2])


def _drop_the_foreign_one(graph: fx.Graph) -> None:
    _drop_a_reduction(graph, "_1")


def _do_not_wait(graph: fx.Graph) -> None:
    wait: Any = _node(graph, "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def _read_too_early(graph: fx.Graph) -> None:
    _node(graph, "x_1").prepend(_node(graph, "neg"))


def _forget_the_value(graph: fx.Graph) -> None:
    del _node(graph, "neg").meta["val"]


BREAKS: dict[Callable[[fx.Graph], None], str] = {
    _return_other_values: "returns other values",
    _return_fewer_values: "returns other values",
    _drop_a_reduction: "other elements are reduced",
    _reduce_twice: "other elements are reduced",
    _reduce_on_another_group: "other elements are reduced",
    _reduce_by_another_operation: "other elements are reduced",
    _drop_the_foreign_one: "not DDP's was changed or moved",
    _do_not_wait: "not waited for",
    _read_too_early: "not well formed",
    _forget_the_value: "neg has no value in its metadata",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_a_broken_invariant_is_named(break_it: Callable[[fx.Graph], None]) -> None:
    graph, facts = _traced()
    break_it(graph)
    with pytest.raises(BrokenInvariantError, match=BREAKS[break_it]):
        verify(graph, facts, groups_of(graph))


@pytest.mark.parametrize("fuse", [concat, coalesced])
def test_facts_are_those_of_the_traced_graph_after_every_pass(fuse) -> None:
    graph, facts = _traced()
    assert chain(fuse(scaling="bucket"), pin())(graph)(graph)
    assert graph_facts(graph, groups_of(graph)) == facts


def test_a_foreign_collective_may_not_change_places_with_one_of_its_group() -> None:
    def backward(x):
        return all_reduce(torch.neg(x), "sum", "other"), all_reduce(x, "max", "other")

    module = trace(backward, [tensor(4)])
    facts = graph_facts(module.graph, groups_of(module.graph))
    first, second = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    _node(module.graph, "neg").prepend(second)
    with pytest.raises(BrokenInvariantError, match="all_reduce_1"):
        verify(module.graph, facts, groups_of(module.graph))
    assert list(first.users)


def test_what_was_not_waited_for_before_need_not_be() -> None:
    module = trace(lambda x: ALL_REDUCE(x, "sum", "ddp0#a"), [tensor(4)])
    groups = groups_of(module.graph)
    verify(module.graph, graph_facts(module.graph, groups), groups)
