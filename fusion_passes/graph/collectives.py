"""The only file that names c10d operators: their overloads, how to decode them, how to call them.

Source of the schemas: ``torch/csrc/distributed/c10d/Functional.cpp``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema

_c10d = torch.ops._c10d_functional

ALL_REDUCE: Final = _c10d.all_reduce.default
ALL_REDUCE_IN_PLACE: Final = _c10d.all_reduce_.default
ALL_REDUCE_COALESCED: Final = _c10d.all_reduce_coalesced.default
ALL_REDUCE_COALESCED_IN_PLACE: Final = _c10d.all_reduce_coalesced_.default
WAIT: Final = _c10d.wait_tensor.default

_COLLECTIVE_NAMESPACES: Final = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")
)
_NOT_A_LAUNCH: Final = frozenset(("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group"))


@dataclass(frozen=True)
class AllReduceNode:
    """The arguments of a node that launches an all-reduce of one tensor.

    Attributes:
        tensor: node of the tensor that is reduced.
        reduce_op: ``"sum"``, ``"avg"``, ...; ``None`` if the argument is not a string.
        group_name: name of the process group; ``None`` if the argument is not a string.
    """

    tensor: fx.Node
    reduce_op: str | None
    group_name: str | None


def decode_all_reduce(node: fx.Node) -> AllReduceNode | None:
    """The all-reduce of one tensor that ``node`` launches; ``None`` for any other node."""
    if node.target not in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
        return None
    tensor, reduce_op, group = _arguments(node, ("input", "reduce_op", "group_name"))
    assert isinstance(tensor, fx.Node), "an all-reduce reads a tensor"
    return AllReduceNode(
        tensor,
        reduce_op if isinstance(reduce_op, str) else None,
        group if isinstance(group, str) else None,
    )


def is_launch(node: fx.Node) -> bool:
    """Whether the node launches a collective of any kind."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace in _COLLECTIVE_NAMESPACES
        and schema(target).name.partition("::")[2] not in _NOT_A_LAUNCH
    )


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective, including a wait whose order is pinned (see
    :class:`fusion_passes.traced.pin.PinOrder`)."""
    return node.target is WAIT or (
        is_pinned(node) and any(inner.target is WAIT for inner in pinned_graph(node).nodes)
    )


def is_pinned(node: fx.Node) -> bool:
    """Whether the node is a ``control_deps`` node, whose order a dependency pins."""
    return str(node.target) == "control_deps"


def data_users(node: fx.Node) -> list[fx.Node]:
    """The users that read the node's value, without those that only have to run after it."""
    return [user for user in node.users if not is_pinned(user) or node in user.args[2:]]


def results_of(launch: fx.Node) -> list[fx.Node]:
    """The output tensors of a collective: the launch itself, or if it returns a list, the
    ``getitem`` nodes of the items that are read."""
    users = data_users(launch)
    is_list = bool(users) and all(user.target is operator.getitem for user in users)
    return users if is_list else [launch]


def without_pins(node: fx.Node) -> fx.Node:
    """The node itself, or for a pinned node, the (first) operator of the subgraph that it runs."""
    if not is_pinned(node):
        return node
    inner: list[fx.Node] = list(pinned_graph(node).nodes)
    return next(item for item in inner if item.op == "call_function")


def pinned_graph(node: fx.Node) -> fx.Graph:
    """The subgraph that a pinned node runs."""
    subgraph = node.args[1]
    owner = node.graph.owning_module
    assert isinstance(subgraph, fx.Node), "a pinned node names its subgraph"
    assert isinstance(subgraph.target, str), "by an attribute"
    assert owner is not None, "of the module that owns the graph"
    return owner.get_submodule(subgraph.target).graph  # type: ignore[return-value]


def group_name_of(launch: fx.Node) -> str | None:
    """Name of the process group of a collective; ``None`` if the argument is not a string."""
    (group,) = _arguments(launch, ("group_name",))
    return group if isinstance(group, str) else None


def issue_order(
    nodes: Iterable[fx.Node], queue_of: Callable[[fx.Node], str | None] = group_name_of
) -> list[list[fx.Node]]:
    """The launches among ``nodes`` by queue, in the given order: all ranks of a process group must
    launch its collectives in the same order."""
    queues: dict[str | None, list[fx.Node]] = {}
    for launch in filter(is_launch, nodes):
        queues.setdefault(queue_of(launch), []).append(launch)
    return list(queues.values())


def all_reduce(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """The ``reduce_op`` of ``tensor`` over the group, after the wait; same shape and dtype."""
    result: Tensor = WAIT(ALL_REDUCE(tensor, reduce_op, group_name))
    return result


def broadcast(tensor: Tensor, source: int, group_name: str) -> Tensor:
    """The tensor of rank ``source`` of the group, after the wait; same shape and dtype."""
    result: Tensor = WAIT(_c10d.broadcast.default(tensor, source, group_name))
    return result


def all_reduce_coalesced(
    tensors: Sequence[Tensor], reduce_op: str, group_name: str
) -> list[Tensor]:
    """As :func:`all_reduce` for each of ``tensors`` (of one dtype), by a single collective."""
    return [WAIT(tensor) for tensor in ALL_REDUCE_COALESCED(list(tensors), reduce_op, group_name)]


def _arguments(node: fx.Node, names: tuple[str, ...]) -> tuple[object, ...]:
    """The node's arguments with these names in the operator's schema; ``None`` if not given."""
    assert isinstance(node.target, OpOverload)
    given = {
        argument.name: value
        for argument, value in zip(schema(node.target).arguments, node.args, strict=False)
    }
    given.update(node.kwargs)
    return tuple(given.get(name) for name in names)
