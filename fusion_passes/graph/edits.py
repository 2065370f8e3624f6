"""Edits of a graph. :func:`record` traces tensor code into it: each operator that the code calls
becomes a node, so shapes, dtypes and strides are right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.families import RESHAPE, TRACED_RESHAPES
from fusion_passes.torch_private.inductor import control_deps, make_subgraph
from fusion_passes.torch_private.older_torch import first_of_list


def record(
    before: fx.Node,
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[fx.Node],
) -> list[fx.Node]:
    """Trace a function into a graph: add a node for each operator that the function calls. This
    takes about a millisecond an operator.

    Args:
        before: existing node; the new nodes are inserted before it, in the order of the calls.
        function: takes a list of tensors and returns a list of tensors.
        inputs: nodes of the tensors in the function's argument. Each has a fake tensor in
            ``meta["val"]``; the new nodes get one too.

    Returns:
        The nodes of the function's results.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # Slow to import.

    sources = list(dict.fromkeys(inputs))
    values = [_like(source.meta["val"]) for source in sources]

    def of_sources(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_source = dict(zip(sources, tensors, strict=True))
        return function([by_source[source] for source in inputs])

    *recorded, output = make_fx(of_sources)(values).graph.nodes
    known = dict(zip(recorded, sources, strict=False))  # First come the placeholders.
    for node in recorded[len(sources) :]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        target = RESHAPE if node.target in TRACED_RESHAPES else node.target
        with before.graph.inserting_before(before):
            known[node] = before.graph.call_function(target, args, kwargs)
        known[node].meta["val"] = node.meta["val"]
    return [known[result] for result in output.args[0]]


def _like(value: Any) -> Tensor:
    """A new fake tensor: nodes can share one, and tracing looks tensors up by identity. A size may
    be a symbol that has got its value since, hence ``int``."""
    sizes, strides = ([*map(int, numbers)] for numbers in (value.shape, value.stride()))
    with value.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def replace_uses(replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Replace each key by its value in all users of the key. Each user is rewritten once, however
    many of its inputs change: the output of a graph can read thousands of nodes."""
    users = {user: None for old in replacements for user in old.users}
    for user in users:
        user.args = fx.map_arg(user.args, lambda node: replacements.get(node, node))
        user.kwargs = fx.map_arg(user.kwargs, lambda node: replacements.get(node, node))


def pin(nodes: Sequence[fx.Node], after: Sequence[fx.Node]) -> fx.Node:
    """Make Inductor's scheduler run ``nodes`` after ``after``, whatever else it reorders.

    ``nodes`` must be neighbours that do not read each other and return one tensor each. They move
    into a subgraph, which a ``control_deps`` node runs in the place of the first of them.

    Returns:
        The ``control_deps`` node. Its value is that of a single node, or else a tuple, which
        ``getitem`` nodes behind it unpack.
    """
    graph, owner = nodes[0].graph, nodes[0].graph.owning_module
    assert owner is not None, "a post-grad graph belongs to a module"
    inputs = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes))
    name = f"pinned_{nodes[0].name}"
    setattr(owner, name, make_subgraph(owner, _copy_of(nodes, inputs)))
    with graph.inserting_before(nodes[0]):
        sources = tuple(map(first_of_list, after))
        arguments: tuple[Any, ...] = (sources, graph.get_attr(name), *inputs)
        pinned = graph.call_function(control_deps(), arguments, name=name)
        if len(nodes) == 1:
            pinned.meta.update(nodes[0].meta)
            values = [pinned]
        else:
            pinned.meta["val"] = tuple(node.meta["val"] for node in nodes)
            values = [graph.call_function(operator.getitem, (pinned, i)) for i in range(len(nodes))]
            for node, value in zip(nodes, values, strict=True):
                value.meta.update(node.meta)
    replace_uses(dict(zip(nodes, values, strict=True)))
    erase(nodes)
    return pinned


def _copy_of(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.Graph:
    """A new graph that computes copies of ``nodes`` from placeholders for ``inputs``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta.update(source.meta)
    results = tuple(graph.node_copy(node, copies.__getitem__) for node in nodes)
    output = graph.output(results if len(nodes) > 1 else results[0])
    values = tuple(node.meta.get("val") for node in nodes)
    output.meta["val"] = values if len(nodes) > 1 else values[0]
    return graph


def erase(nodes: Sequence[fx.Node]) -> None:
    """Remove nodes that have no users left outside of ``nodes``, the last node first."""
    for node in reversed(nodes):
        node.graph.erase_node(node)
