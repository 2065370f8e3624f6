"""When each node of a graph has been computed: an estimate from shapes and measured rates. Pure.

Matrix products, convolutions and attention take their operations, or their bytes where that is
longer; kernels that Inductor generates take the bytes that they read and write. Pointwise operators
whose values only others like them read are fused into those, and cost nothing by themselves. All in
whole nanoseconds from shapes, so that the same graph gives the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from fusion_passes.graph.collectives import is_launch, is_wait
from fusion_passes.graph.kernels import is_library_kernel
from fusion_passes.graph.transparent import COPY, ITEMS, VIEWS
from fusion_passes.profile.records import Rates
from fusion_passes.reductions.find import dtype_name
from fusion_passes.torch_private import OpOverload

_FREE: Final = VIEWS | ITEMS | {COPY}
"""Views compute nothing; a copy only says into which layout what is before it is stored."""

_ATTENTION: Final = "scaled_dot_product"


def ready_times(
    graph: fx.Graph, rates: Rates, free: Collection[fx.Node] = frozenset()
) -> list[int]:
    """When each node of a graph has been computed: nanoseconds from its start, in order.

    Args:
        graph: with fake values in ``meta["val"]``.
        rates: of compute.
        free: nodes that cost nothing, as what reduces a gradient.
    """
    return [*accumulate(0 if node in free else _cost_ns(node, rates) for node in graph.nodes)]


def _cost_ns(node: fx.Node, rates: Rates) -> int:
    if node.op != "call_function" or node.target in _FREE or is_launch(node) or is_wait(node):
        return 0
    moved = 0
    if is_library_kernel(node) or not _is_pointwise(node):
        moved = _bytes_of(node) + sum(map(_bytes_of, node.all_input_nodes))
    elif any(not _is_fused(user) for user in _readers(node)):
        # Of a fused kernel: what its last operator stores, and reads that is in memory.
        stored = [source for source in node.all_input_nodes if not _is_fused(source)]
        moved = _bytes_of(node) + sum(map(_bytes_of, stored))
    if not moved:
        return 0
    moving = moved * 10**9 // rates.bytes_per_s
    flops = _flops(node) if is_library_kernel(node) else 0
    if not flops:
        return max(moving, rates.kernel_ns)
    return max(flops * 10**9 // rates.flops_of(_dtype_of(node)), moving, rates.kernel_ns)


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node's value, views looked through."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += _readers(user) if user.target in _FREE and user.users else [user]
    return readers


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_fused(node: fx.Node) -> bool:
    """Whether a node is a part of the kernels around it."""
    return node.op == "call_function" and (_is_pointwise(node) or node.target in _FREE)


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def _bytes_of(node: fx.Node) -> int:
    return sum(math.prod(_shape(value)) * value.dtype.itemsize for value in _values(node))


def _dtype_of(node: fx.Node) -> str:
    values = _values(node)
    return dtype_name(values[0].dtype) if values else "float32"


def _shape(value: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; of symbolic ones those that the graph was traced with, without fixing
    them."""
    return tuple(map(_size, value.shape))


def _size(size: int | torch.SymInt) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    return hint if isinstance(hint, int) else 1


def _flops(node: fx.Node) -> int:
    """Operations of a library's kernel; 0 where nobody has counted them."""
    target = node.target
    assert isinstance(target, OpOverload), "a library's kernel is an operator"
    shapes = [_shape(value) for source in node.all_input_nodes for value in _values(source)]
    if _ATTENTION in str(target):
        return _attention_flops(shapes, "backward" in str(target))
    count: Callable[..., Any] | None = flop_registry.get(target.overloadpacket)
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _in_place_of)
    return int(count(*args, **kwargs, out_val=_in_place_of(node)))


def _in_place_of(node: fx.Node) -> Any:
    """What stands in the place of a node: tensors without memory, of its shapes. Several results
    keep their places, also where some are ``None``: a convolution's backward gives only what is
    needed."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return tuple(map(_without_memory, value))
    return _without_memory(value)


def _without_memory(value: Any) -> Any:
    return torch.empty(_shape(value), device="meta") if isinstance(value, Tensor) else None


def _attention_flops(shapes: list[tuple[int, ...]], is_backward: bool) -> int:
    """Two products forward, and five backward, of queries with keys; the kernels of each device
    are operators of their own, with these inputs first."""
    big = [shape for shape in shapes if len(shape) == 4]
    if len(big) < 3:
        return 0
    queries, keys = (big[1], big[2]) if is_backward else (big[0], big[1])
    product = 2 * math.prod(queries) * keys[-2]
    return product * (5 if is_backward else 2)
