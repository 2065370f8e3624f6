"""Traced backwards with sparse gradients, which Dynamo cannot trace (torch 2.11 to 2.15): it breaks
the graph where one is made, leaves what follows untraced, and raises an error if one is kept.

Here all that is made of sparse gradients is put behind the rest of the backward, which stays one
graph, and runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fusion_passes.graph.operators import DONATE
from fusion_passes.torch_private import OpOverload, disable_dynamo
from fusion_passes.torch_private.autograd import schema

_Compile = Callable[[fx.GraphModule], Any]


def apart(compiler: _Compile) -> _Compile:
    """Compile backwards that compiled autograd has traced without what is sparse in them.

    Args:
        compiler: compiles the rest.
    """

    def compile_dense(traced: fx.GraphModule) -> Any:
        if not _move_sparse(traced):
            return compiler(traced)
        compiled = compiler(traced)

        def run(inputs: list[Any], *others: Any) -> Any:
            for index, value in enumerate(inputs):
                if isinstance(value, Tensor) and value.layout is not torch.strided:
                    inputs[index] = torch.empty(0)  # A kept gradient, read when it is added to.
            return compiled(inputs, *others)

        return run

    return compile_dense


def _move_sparse(traced: fx.GraphModule) -> bool:
    """Move what is made of sparse gradients to the end of a graph, into one untraced call.

    Before::

        rows = sparse_coo_tensor(indices, values)
        call_accumulate_grad(table, table_grad, rows)
        call_hook(hook, table)
        ... the rest of the backward ...

    After::

        ... the rest of the backward ...
        untraced(indices, values, table, hook)

    Returns:
        Whether there was anything to move.
    """
    moved = _made_of_sparse(traced.graph)
    if not moved:
        return False
    outside = list(dict.fromkeys(n for node in moved for n in _needs(node) if n not in moved))
    run = fx.GraphModule(traced, _copied(moved, outside), "SparseGradients")

    def run_sparse_gradients(*given: Any) -> None:
        with torch.no_grad():
            run(*given)

    graph = traced.graph
    _keep(graph, outside)
    with graph.inserting_before(_end_of(graph)):
        graph.call_function(disable_dynamo(run_sparse_gradients), tuple(outside))
    inputs = dict.fromkeys(n for node in moved for n in node.all_input_nodes if n not in moved)
    for node in reversed(list(moved)):
        graph.erase_node(node)
    for node in inputs:
        if not node.users and node.op == "call_function":
            graph.erase_node(node)  # A gradient that was kept, among the graph's inputs.
    traced.recompile()
    return True


def _keep(graph: fx.Graph, needed: Collection[fx.Node]) -> None:
    """Have a graph overwrite nothing that is needed after it."""
    for node in graph.find_nodes(op="call_function", target=DONATE):
        saved: Any = node.args[0]
        node.args = ([each for each in saved if each not in needed],)
        if not node.args[0]:
            graph.erase_node(node)


def _copied(moved: Iterable[fx.Node], outside: Iterable[fx.Node]) -> fx.Graph:
    """A graph of these nodes alone.

    Args:
        moved: in their order.
        outside: what they need of others, its inputs.
    """
    graph = fx.Graph()
    values = {node: graph.placeholder(f"outside_{n}") for n, node in enumerate(outside)}
    for node in moved:
        if _is_accumulation(node):
            given = tuple(values[needed] for needed in _needs(node))
            values[node] = graph.call_function(_accumulate, given)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(None)
    return graph


def _needs(node: fx.Node) -> list[fx.Node]:
    if _is_accumulation(node):
        return [n for n in (node.args[0], node.args[-2]) if isinstance(n, fx.Node)]
    return list(node.all_input_nodes)


def _made_of_sparse(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that make sparse gradients, those that use them, and hooks that see them; in the
    graph's order."""
    found: dict[fx.Node, None] = {}
    variables = set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        uses = any(needed in found for needed in node.all_input_nodes)
        is_hook = _name(node) == "call_hook" and node.args[1] in variables
        if uses or is_hook or _makes_sparse(node):
            found[node] = None
            if _is_accumulation(node):
                variables.add(node.args[0])
    return found


def _makes_sparse(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in schema(node.target).arguments]
        if "sparse_coo_tensor" in str(node.target):
            return True
        index = names.index("sparse") if "sparse" in names else len(node.args)
        return index < len(node.args) and node.args[index] is True
    # The backward of an eager embedding: what it has saved are its arguments, in no known order.
    return _name(node).startswith("Embedding") and any(value is True for value in node.args[2:])


def _is_accumulation(node: fx.Node) -> bool:
    return _name(node) == "call_accumulate_grad"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def _end_of(graph: fx.Graph) -> fx.Node:
    """Where callbacks at the end of the backward are called, if they are; else the output."""
    nodes = (node for node in graph.nodes if "_exec_final_callbacks" in _name(node))
    return next(nodes, graph.output_node())


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Do what autograd does with a gradient."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.layout is gradient.layout:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = parameter.grad + gradient
