"""The package's own operators: what they compute, in eager torch and on fake tensors.

Inductor does not call these: it lowers them (see :mod:`fusion_passes.lowering`) so that nothing is
left of them where it can be helped. They are real operators all the same, so that a fused graph
can be run node by node and gives the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fusion_passes.agreement import agree

_library: Final = torch.library.Library("fusion_passes", "FRAGMENT")


def _define(
    name: str, signature: str, function: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> Any:
    _library.define(f"{name}{signature}", tags=tags)
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, function, "Meta")
    return getattr(torch.ops.fusion_passes, name).default


def _pack(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    scale: str,
    factor: float,
    label: str,  # noqa: ARG001 - the lowering's
) -> Tensor:
    numel = sum(gradient.numel() for gradient in gradients)
    bucket = torch.empty(numel, dtype=dtype, device=gradients[0].device)
    _store(bucket, gradients, offsets, strides, scale.removesuffix(IN_BUCKET), factor)
    return bucket


def _store(
    bucket: Tensor,
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    scale: str,
    factor: float,
) -> None:
    places = [
        bucket.as_strided(gradient.shape, stride, bucket.storage_offset() + offset)
        for gradient, offset, stride in zip(
            gradients, offsets, split_strides(gradients, strides), strict=True
        )
    ]
    if scale == "none":
        torch._foreach_copy_(places, list(gradients))
        return
    operation = torch.div if scale == "div" else torch.mul
    for place, gradient in zip(places, gradients, strict=True):
        operation(gradient, factor, out=place)


def _agree(sent: Tensor, module: str, collectives: str) -> None:
    if sent.device.type != "meta":
        agree(module, collectives)


def _donate(saved: Sequence[Tensor]) -> None:
    pass


def _widen(bucket: Tensor, dtype: torch.dtype, scale: str, factor: float) -> Tensor:
    return scaled(bucket.to(dtype), scale, factor)


def scaled(tensor: Tensor, scale: str, factor: float) -> Tensor:
    """``tensor`` divided or multiplied by a number.

    Args:
        tensor: of any shape.
        scale: ``"div"``, ``"mul"``, or ``"none"``: the tensor itself.
        factor: the number.
    """
    if scale == "none":
        return tensor
    return tensor / factor if scale == "div" else tensor * factor


def split_strides(tensors: Sequence[Any], strides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The strides of each tensor, out of those of all of them in one list."""
    numbers = iter(strides)
    for tensor in tensors:
        yield tuple(itertools.islice(numbers, len(tensor.shape)))


IN_BUCKET: Final = " in bucket"
"""Behind the ``scale`` of :data:`PACK`: scaled in one pass over the bucket once all is stored,
and not by the kernels that store the gradients. The values are the same."""

PACK: Final = _define(
    "pack",
    "(Tensor[] gradients, int[] offsets, int[] strides, ScalarType dtype, str scale, float factor, "
    "str label) -> Tensor",
    _pack,
)
"""Gradients in one flat buffer, each in its place, cast and scaled.

Args:
    gradients: of any shapes and strides, on one device.
    offsets: where each one starts in the buffer, in elements. The places cover the buffer.
    strides: of the places, one gradient's after the other's.
    dtype: of the buffer.
    scale: ``"none"``, ``"div"`` or ``"mul"``, or one of the last two with :data:`IN_BUCKET`.
    factor: what a gradient is divided or multiplied by. It is scaled in its own dtype, and cast
        then.
    label: which bucket of which plan this is, for the report.

Returns:
    The buffer: ``[sum of the gradients' elements]``.
"""

STORE: Final = _define(
    "store_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, str scale, "
    "float factor) -> ()",
    _store,
)
"""What :data:`PACK` does, for some gradients, to a buffer that is there: one call for all that must
be copied, where Inductor has no kernel for tensors of several sizes (on the CPU)."""

WIDEN: Final = _define(
    "widen", "(Tensor bucket, ScalarType dtype, str scale, float factor) -> Tensor", _widen
)
"""A reduced buffer in its gradients' dtype, scaled there: ``[n]`` to ``[n]``.

An operator of its own, because its kernel must wait for the collective, and nothing else must come
to wait with it.
"""

AGREE: Final = _define(
    "agree_",
    "(Tensor(a!) sent, str module, str collectives) -> ()",
    _agree,
    # Replayed, it would say nothing: Inductor cuts a CUDA graph in two around it.
    tags=(torch.Tag.cudagraph_unsafe,),
)
"""Comes back once all ranks of a DDP module's group are known to run the same collectives, and
raises if they do not (see :func:`fusion_passes.agreement.agree`).

It claims to write ``sent``, the first that is to be sent, so that it runs before the launch. It
does not touch it.
"""

DONATE: Final = _define("donate", "(Tensor[] saved) -> ()", _donate)
"""Says that these inputs of a graph may be overwritten once they have been read.

It does nothing. Its lowering tells Inductor, and as a part of the graph it is in the key of
Inductor's cache.
"""
torch.fx.has_side_effect(DONATE)  # Kept, though nobody uses what it returns.
