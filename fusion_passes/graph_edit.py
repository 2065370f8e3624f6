"""Writes tensor code into a graph: the code runs once on fake tensors, and every operator that it
calls becomes a node, so that shapes, dtypes and strides are right by construction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusion_passes.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode

# After Inductor has chosen layouts, a stride in the graph is no promise any more: its post-grad
# graphs hold reshapes where the traced ones held views, and so do the nodes written here.
_POST_GRAD_FORM: Final[dict[object, Any]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def record(
    before: fx.Node, function: Callable[..., Any], inputs: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Writes what ``function`` does in front of a node.

    Args:
        before: the new nodes stand in front of it, in the order of the calls.
        function: tensor code; takes a list of tensors and returns a list of tensors.
        inputs: the nodes for ``function``'s list; each has a fake tensor in ``meta["val"]``.

    Returns:
        The nodes of ``function``'s results, and all new nodes in order.
    """
    fake_mode = fake_mode_of(inputs)
    with fake_mode, torch.no_grad():
        values = _distinct_values(inputs)
        recorder = _Recorder(before, dict(zip(inputs, values, strict=True)))
        with recorder:
            results = function([recorder.value_of(node) for node in inputs])
    return [recorder.node_of(result) for result in results], recorder.new_nodes


def fake_mode_of(nodes: Sequence[fx.Node]) -> FakeTensorMode:
    """The mode that the nodes' fake values belong to."""
    value = nodes[0].meta["val"]
    assert isinstance(value, FakeTensor), f"{nodes[0].name} has no fake value"
    return value.fake_mode


def _distinct_values(nodes: Sequence[fx.Node]) -> list[Tensor]:
    """The nodes' fake values, each an object of its own: two nodes can share one, but the
    recorder tells values apart by identity."""
    seen: dict[int, fx.Node] = {}
    values = []
    for node in nodes:
        value = node.meta["val"]
        if seen.setdefault(id(value), node) is not node:
            value = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        values.append(value)
    return values


class _Recorder(TorchDispatchMode):
    """Turns each dispatched operator into a node."""

    def __init__(self, before: fx.Node, values: Mapping[fx.Node, Tensor]) -> None:
        super().__init__()
        self._before = before
        self._graph = before.graph
        self._values = values
        self.new_nodes: list[fx.Node] = []
        # Keyed by identity; the tensor is kept beside its node so that no id is used twice.
        self._known: dict[int, tuple[Tensor, fx.Node]] = {
            id(value): (value, node) for node, value in values.items()
        }

    def value_of(self, node: fx.Node) -> Tensor:
        return self._values[node]

    def node_of(self, tensor: Tensor) -> fx.Node:
        return self._known[id(tensor)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # A question about a tensor, such as its device: no part of the graph.
        new_args, new_kwargs = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        node = self._add(_POST_GRAD_FORM.get(func, func), new_args, new_kwargs, result)
        if isinstance(result, list | tuple):
            for index, item in enumerate(result):
                self._add(operator.getitem, (node, index), {}, item)
        return result

    def _add(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        self.new_nodes.append(node)
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, node)
        return node


def erase(nodes: Sequence[fx.Node]) -> None:
    """Removes nodes, last first, that nothing reads any more."""
    for node in reversed(nodes):
        node.graph.erase_node(node)
