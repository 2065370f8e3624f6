"""The package's own operators: what they compute, in eager torch and on fake tensors.

Inductor does not call those of a bucket: it lowers them (see :mod:`fusion_passes.traced.pack`) so
that nothing is left of them where it can be helped. They are real operators all the same, so that a
fused graph can be run node by node and gives the same values.
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
    without_view_tracking,
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
    """Define one of the package's operators, with a signature and tags as torch has them.

    ``meta`` does what ``function`` does for tensors without data, and by default is ``function``;
    ``fake`` does it for fake ones, in the place of ``meta``, where the operator takes no tensor.
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
    in_bucket: bool,  # noqa: ARG001 - where, not what: the lowering's
    label: str,  # noqa: ARG001 - the lowering's
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


def _as_complex(real: Tensor) -> Tensor:
    with without_view_tracking():
        return torch.view_as_complex(real)


def _widen(bucket: Tensor, dtype: torch.dtype, divisor: float) -> Tensor:
    return divided(bucket.to(dtype), divisor)


def divided(value: _T, divisor: float, operations: Any = torch) -> _T:
    """A tensor, or what stands for one where ``operations`` are (Inductor's lowerings), divided by
    a number in its own dtype; ``value`` itself for 1."""
    if divisor == 1:
        return value
    quotient: _T = operations.div(value, divisor)
    return quotient


def split_strides(tensors: Sequence[Any], strides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The strides of each tensor, out of those of all of them in one list."""
    numbers = iter(strides)
    for tensor in tensors:
        yield tuple(itertools.islice(numbers, len(tensor.shape)))


PACK: Final = define(
    "pack",
    "(Tensor[] gradients, int[] offsets, int[] strides, ScalarType dtype, float divisor, "
    "bool in_bucket, str label) -> Tensor",
    _pack,
)
"""Gradients in one flat buffer, each in its place, divided and cast.

Args:
    gradients: of any shapes and strides, on one device.
    offsets: where each one starts in the buffer, in elements. The places cover the buffer.
    strides: of the places, one gradient's after the other's.
    dtype: of the buffer.
    divisor: what a gradient is divided by, in its own dtype.
    in_bucket: whether they are divided in one pass over the buffer once all is stored, and not by
        the kernels that store the gradients. The values are the same.
    label: which bucket of which plan this is, for the report.

Returns:
    The buffer: ``[sum of the gradients' elements]``.
"""

STORE: Final = define(
    "store_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, "
    "float divisor=1.0) -> ()",
    store,
)
"""What :data:`PACK` does, for some gradients, to a buffer that is there: one call for all that must
be copied, where Inductor has no kernel for tensors of several sizes (on the CPU)."""

WIDEN: Final = define("widen", "(Tensor bucket, ScalarType dtype, float divisor) -> Tensor", _widen)
"""A reduced buffer in its gradients' dtype, divided there: ``[n]`` to ``[n]``.

An operator of its own, because its kernel must wait for the collective, and nothing else must come
to wait with it.
"""

AS_COMPLEX: Final = define("as_complex", "(Tensor(a) real) -> Tensor(a)", _as_complex)
"""``view_as_complex``, but what it gives is no view as far as autograd can see: ``[..., 2]`` to
``[...]``. A gradient that is a complex view of a real tensor is nothing that Dynamo (torch 2.11 to
2.15) can make a fake tensor of, in the next compile of a model that has it.
"""


# --- Sparse tensors ------------------------------------------------------------------------------


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


_NAMES: Final = ("sparse_rows", "sparse_rows_of_bag")
_MAKERS: Final = MappingProxyType(
    {
        maker: _of_own_memory(maker, name)
        for maker, name in zip(makers_of_sparse_gradients(), _NAMES, strict=True)
    }
)
"""What makes sparse gradients, and what takes its place."""


def give_own_memory(graph: fx.Graph) -> None:
    """Have the sparse tensors of a post-grad graph copy what they are made of.

    A sparse tensor holds the very tensors that it is made of, its indices and values. Inductor
    knows nothing of that: it takes these for read once the sparse tensor is made, and lets what is
    computed next overwrite them. So the gradient of an embedding that was compiled is wrong where a
    kernel after it needs as much memory, with DDP or without (torch 2.11 to 2.15; the shapes and
    the order of the layers decide).

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
        # Inductor finds out what it gives. It would compare it with what is there, by the storage
        # that a sparse tensor has none of.
        copy.meta = {key: value for key, value in node.meta.items() if key != "val"}
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
