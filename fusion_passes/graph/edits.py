"""Edits of a graph. :func:`record` traces tensor code into it: the code runs once on meta tensors,
and each operator that it calls becomes a node, so shapes, dtypes and strides are right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.families import RESHAPE, TRACED_RESHAPES
from fusion_passes.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode
from fusion_passes.torch_private.autograd import below_autograd
from fusion_passes.torch_private.inductor import control_deps, make_subgraph
from fusion_passes.torch_private.older_torch import first_of_list


def record(
    before: fx.Node,
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[fx.Node],
) -> list[fx.Node]:
    """Trace a function into a graph: add a node for each operator that the function calls.

    Args:
        before: existing node; the new nodes are inserted before it, in the order of the calls.
        function: takes a list of tensors and returns a list of tensors. It runs on meta tensors,
            which are ten times faster than fake tensors: a bucket can have thousands of gradients.
        inputs: nodes of the tensors in the function's argument, all on one device. Each has a fake
            tensor in ``meta["val"]``; the new nodes get one too.

    Returns:
        The nodes of the function's results.
    """
    fake = inputs[0].meta["val"]
    assert isinstance(fake, FakeTensor), f"{inputs[0].name} has no fake value"
    # Nodes can share a fake tensor, but the recorder looks tensors up by identity: make new ones.
    values = {node: _meta_like(node.meta["val"]) for node in inputs}
    recorder = _Recorder(before, values, fake.fake_mode, fake.device)
    with below_autograd(), recorder:
        results = function([values[node] for node in inputs])
    return [recorder.node_of(result) for result in results]


def _meta_like(value: Tensor) -> Tensor:
    """A meta tensor. A size may be a symbol that has got its value since, hence ``int``."""
    sizes, strides = ([*map(int, numbers)] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


class _Recorder(TorchDispatchMode):
    """Adds a node for each operator that is dispatched."""

    def __init__(
        self,
        before: fx.Node,
        values: Mapping[fx.Node, Tensor],
        fake_mode: FakeTensorMode,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._before = before
        self._graph = before.graph
        self._fake_mode = fake_mode
        self._device = device
        # Key: id of the tensor. The value keeps the tensor alive, so that no id is used twice.
        self._known: dict[int, tuple[Tensor, fx.Node]] = {
            id(value): (value, node) for node, value in values.items()
        }

    def node_of(self, tensor: Tensor) -> fx.Node:
        return self._known[id(tensor)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # A query such as the device of a tensor; it is not part of the graph.
        if isinstance(result, Tensor) and result.device.type != "meta":
            result = _meta_like(result)  # The operator takes a device argument.
        new_args = self._nodes_for(args)
        new_kwargs = {name: self._nodes_for(value) for name, value in kwargs.items()}
        target = RESHAPE if func in TRACED_RESHAPES else func
        node = self._add(target, new_args, new_kwargs, result)
        if isinstance(result, list | tuple):
            for index, item in enumerate(result):
                self._add(operator.getitem, (node, index), {}, item)
        return result

    def _nodes_for(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, list | tuple):
            return type(value)(self._nodes_for(item) for item in value)
        return value

    def _add(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = self._fake(value)
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, node)
        return node

    def _fake(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return FakeTensor(self._fake_mode, value, self._device)
        return type(value)(self._fake(item) for item in value)


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
