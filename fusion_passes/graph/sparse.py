"""Sparse tensors in graphs: they get memory of their own.

A sparse tensor holds the very tensors that it is made of, its indices and values. Inductor knows
nothing of that: it takes these for read once the sparse tensor is made, and lets what is computed
next overwrite them. So the gradient of an embedding that was compiled is wrong where a kernel after
it needs as much memory, with DDP or without (torch 2.11 to 2.15; the shapes and the order of the
layers decide).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import (
    makers_of_sparse_gradients,
    register_fake,
    schema,
)

_library: Final = torch.library.Library("fusion_passes", "FRAGMENT")


def _of_own_memory(maker: OpOverload, name: str) -> Any:
    """Define an operator with the arguments of one that makes a sparse tensor, which copies what it
    is made of."""
    _, begin, signature = str(schema(maker)).partition("(")
    _library.define(f"{name}{begin}{signature}")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = maker(*args, **kwargs)
        return made.clone()

    _library.impl(name, make, "CompositeExplicitAutograd")
    register_fake(_library, name, maker)
    return getattr(torch.ops.fusion_passes, name).default


_MAKERS: Final = MappingProxyType(
    {
        maker: _of_own_memory(maker, name)
        for maker, name in zip(
            makers_of_sparse_gradients(), ("sparse_rows", "sparse_rows_of_bag"), strict=True
        )
    }
)
"""What makes sparse gradients, and what takes its place."""


def give_own_memory(graph: fx.Graph) -> bool:
    """Have the sparse tensors of a post-grad graph copy what they are made of.

    Before::

        rows: sparse f32[n, d] = aten._sparse_coo_tensor_with_dims_and_tensors(.., indices, values)

    After::

        rows: sparse f32[n, d] = fusion_passes.sparse_rows(.., indices, values)

    Returns:
        Whether there were any.
    """
    found = [node for node in graph.nodes if node.target in _MAKERS and _is_sparse(node)]
    for node in found:
        with graph.inserting_before(node):
            copy = graph.call_function(_MAKERS[node.target], node.args, node.kwargs)
        # Inductor finds out what it gives. It would compare it with what is there, by the storage
        # that a sparse tensor has none of.
        copy.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
    return bool(found)


def _is_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo
