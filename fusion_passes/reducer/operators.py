"""The operators by which a compiled backward and the reducers talk: which memory gradients are
stored in, and that they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fusion_passes.reducer.backward import mark_ready, memory_of_bucket

_library: Final = torch.library.Library("fusion_passes", "FRAGMENT")

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)
"""Replayed, they would say nothing: Inductor cuts a CUDA graph in two around them."""


def _define(name: str, signature: str, tags: tuple[torch.Tag, ...] = ()) -> None:
    _library.define(f"{name}{signature}", tags=tags)


def _empty(
    positions: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    del positions, offsets
    return torch.empty(numel, dtype=dtype, device=device)


def _store(
    bucket: Tensor,
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    positions: Sequence[int],
) -> None:
    copy_in(bucket, gradients, offsets, strides)
    mark_ready(bucket, positions)


def copy_in(
    bucket: Tensor, gradients: Sequence[Tensor], offsets: Sequence[int], strides: Sequence[int]
) -> None:
    """Copy gradients to their places in a bucket."""
    rest = iter(strides)
    targets = [
        bucket.as_strided(
            gradient.shape,
            [next(rest) for _ in gradient.shape],
            bucket.storage_offset() + offset,
        )
        for gradient, offset in zip(gradients, offsets, strict=True)
    ]
    torch._foreach_copy_(targets, list(gradients))


def _nothing(*_: object) -> None:
    pass


_define(
    "bucket",
    "(int[] positions, int[] offsets, int numel, ScalarType dtype, Device device) -> Tensor",
    _TAGS,
)
_library.impl("bucket", memory_of_bucket, "CompositeExplicitAutograd")
torch.library.register_fake("fusion_passes::bucket", _empty, lib=_library)

_define(
    "store_gradients_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, int[] positions) -> ()",
    _TAGS,
)
_library.impl("store_gradients_", _store, "CompositeExplicitAutograd")
_library.impl("store_gradients_", _nothing, "Meta")

_define(
    "copy_in_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides) -> ()",
)
_library.impl("copy_in_", copy_in, "CompositeExplicitAutograd")
_library.impl("copy_in_", _nothing, "Meta")

_define(
    "mark_ready_",
    "(Tensor(a!) bucket, int[] positions, int[] copied=[], str why='') -> ()",
    _TAGS,
)
_library.impl("mark_ready_", mark_ready, "CompositeExplicitAutograd")
_library.impl("mark_ready_", _nothing, "Meta")

BUCKET: Final[Any] = torch.ops.fusion_passes.bucket.default
"""Memory for gradients that a graph stores together.

Args:
    positions: of the parameters among the tensor inputs of the forward, in the order in which their
        gradients lie. The autograd node that runs says whose they are.
    offsets: of each gradient, in elements.
    numel: of all of them.
    dtype: of all of them.
    device: of all of them.

Returns:
    ``[numel]``, a part of a bucket, or memory of the graph's own.
"""

STORE_GRADIENTS: Final[Any] = torch.ops.fusion_passes.store_gradients_.default
"""Gradients in their places of :data:`BUCKET`'s memory, of which the reducer is told then.

Args:
    bucket: the memory.
    gradients: of any shapes and strides.
    offsets: of their places, in elements.
    strides: of their places, one gradient's after the other's.
    positions: as for :data:`BUCKET`.
"""

COPY_IN: Final[Any] = torch.ops.fusion_passes.copy_in_.default
"""What :data:`STORE_GRADIENTS` does for gradients that no kernel can store in their places itself:
one call for all, where Inductor has no kernel for tensors of several sizes (on the CPU)."""

MARK_READY: Final[Any] = torch.ops.fusion_passes.mark_ready_.default
"""Tells the reducer that all gradients of :data:`BUCKET`'s memory are stored: they are ready, once
they are copied into the bucket if the memory is the graph's own. In the first round the reducer
learns their order instead, and hooks copy them.

It writes the memory where more is to be added to what the graph has stored: a gradient that exists
already, or what other forwards give of a sum. Declared as a write, it also keeps the memory:
Inductor neither frees nor reuses it before.

Args:
    bucket: the memory.
    positions: as for :data:`BUCKET`.
    copied: those of the positions whose gradients the graph copies to their places, for the report.
    why: a reason for each of these, with ``|`` between them.
"""
