"""The package's own operators: their implementations, for eager torch and for fake tensors.

Inductor does not call :data:`PACK` and :data:`WIDEN`. It lowers them (see
:mod:`fusion_passes.traced.pack`) so that, if possible, no kernel is left of them. They are real
operators nevertheless, so a fused graph can also run node by node and computes the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import (
    makers_of_sparse_gradients,
    register_fake,
    schema,
)

_T = TypeVar("_T")

_library: Final = torch.library.Library("fusion_passes", "FRAGMENT")


def define(
    name: str,
    signature: str,
    function: Callable[..., Any],
    *,
    meta: Callable[..., Any] | None = None,
    fake: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Define one of the package's operators, with a signature and tags in torch's format.

    ``meta`` is the implementation for meta tensors, by default ``function``. An operator without
    tensor arguments gets ``fake`` instead, an implementation for fake tensors.
    """
    _library.define(f"{name}{signature}", tags=tags)
    _library.impl(name, function, "CompositeExplicitAutograd")
    if fake is None:
        _library.impl(name, meta or function, "Meta")
    else:
        register_fake(_library, name, fake)
    return getattr(torch.ops.fusion_passes, name).default


def _pack(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    divisor: float,
    in_bucket: bool,  # noqa: ARG001 - only the lowering reads it
    label: str,  # noqa: ARG001 - only the lowering reads it
) -> Tensor:
    numel = sum(gradient.numel() for gradient in gradients)
    bucket = torch.empty(numel, dtype=dtype, device=gradients[0].device)
    store(bucket, gradients, offsets, strides, divisor)
    return bucket


def store(
    bucket: Tensor,
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    divisor: float = 1.0,
) -> None:
    """See :data:`STORE`."""
    places = [
        bucket.as_strided(gradient.shape, stride, bucket.storage_offset() + offset)
        for gradient, offset, stride in zip(
            gradients, offsets, split_strides(gradients, strides), strict=True
        )
    ]
    if divisor == 1:
        torch._foreach_copy_(places, list(gradients))
        return
    for place, gradient in zip(places, gradients, strict=True):
        torch.div(gradient, divisor, out=place)


def _widen(bucket: Tensor, dtype: torch.dtype, divisor: float) -> Tensor:
    return divided(bucket.to(dtype), divisor)


def divided(value: _T, divisor: float, operations: Any = torch) -> _T:
    """``value / divisor`` in the dtype of ``value``; ``value`` itself if ``divisor`` is 1. It is a
    tensor, or Inductor's value of one if ``operations`` are Inductor's lowerings."""
    if divisor == 1:
        return value
    quotient: _T = operations.div(value, divisor)
    return quotient


def split_strides(tensors: Sequence[Any], strides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The strides of each tensor, from one list with the strides of all tensors."""
    numbers = iter(strides)
    for tensor in tensors:
        yield tuple(itertools.islice(numbers, len(tensor.shape)))


PACK: Final = define(
    "pack",
    "(Tensor[] gradients, int[] offsets, int[] strides, ScalarType dtype, float divisor, "
    "bool in_bucket, str label) -> Tensor",
    _pack,
)
"""Stores gradients in one new flat buffer, each at its place, divided and cast.

Args:
    gradients: gradients of any shapes and strides, on one device.
    offsets: start of each place in the buffer, in elements. The places cover the buffer.
    strides: strides of all places, concatenated, in elements.
    dtype: dtype of the buffer.
    divisor: number that each gradient is divided by, in the gradient's own dtype.
    in_bucket: whether one pass over the buffer divides after all gradients are stored, instead of
        the kernels that store the gradients. The values are the same.
    label: plan and index of the bucket, for the report.

Returns:
    The buffer: ``[total number of elements of the gradients]``.
"""

STORE: Final = define(
    "store_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, "
    "float divisor=1.0) -> ()",
    store,
)
"""As :data:`PACK`, but stores some gradients in an existing buffer. One call copies all gradients
that must be copied on devices for which Inductor has no foreach kernels (the CPU)."""

WIDEN: Final = define("widen", "(Tensor bucket, ScalarType dtype, float divisor) -> Tensor", _widen)
"""Casts a reduced buffer to the dtype of its gradients, then divides it: ``[n]`` to ``[n]``.

It is a separate operator because its kernel has to wait for the collective, and no other kernel may
be fused into it and then wait too.
"""


# --- Sparse tensors ------------------------------------------------------------------------------


def _of_own_memory(maker: OpOverload, name: str) -> Any:
    """Define an operator with the signature of ``maker``, an operator that makes a sparse tensor.
    The result of the new operator has copies of the indices and values."""
    _, begin, signature = str(schema(maker)).partition("(")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = maker(*args, **kwargs)
        return made.clone()

    return define(name, begin + signature, make, fake=maker)


_NAMES: Final = ("sparse_rows", "sparse_rows_of_bag")
_MAKERS: Final = MappingProxyType(
    {
        maker: _of_own_memory(maker, name)
        for maker, name in zip(makers_of_sparse_gradients(), _NAMES, strict=True)
    }
)
"""Maps each operator that makes sparse gradients to the operator that replaces it."""


def give_own_memory(graph: fx.Graph) -> None:
    """Make the sparse tensors of a post-grad graph copy their indices and values.

    A sparse tensor keeps the tensors that it was made from, its indices and values. Inductor does
    not know that: it takes these buffers for dead once the sparse tensor is made, and reuses their
    memory in later kernels. So the sparse gradient of a compiled embedding is wrong if a later
    kernel needs a buffer of the same size, with DDP or without it (torch 2.11 to 2.15; it depends
    on the shapes and the order of the layers).

    Before::

        rows: sparse f32[n, d] = aten._sparse_coo_tensor_with_dims_and_tensors(.., indices, values)

    After::

        rows: sparse f32[n, d] = fusion_passes.sparse_rows(.., indices, values)
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        is_sparse = isinstance(value, Tensor) and value.layout is torch.sparse_coo
        if node.target not in _MAKERS or not is_sparse:
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(_MAKERS[node.target], node.args, node.kwargs)
        # Leave out "val", which Inductor then computes. It would compare an existing one with its
        # own by their storages, and a sparse tensor has no storage.
        copy.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
