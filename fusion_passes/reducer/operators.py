"""The operators by which a compiled backward and the reducers talk: which memory gradients are
stored in, and that they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fusion_passes.graph.operators import define, store
from fusion_passes.reducer.backward import mark_ready, memory_of_bucket

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)
"""Replayed, they would say nothing: Inductor cuts a CUDA graph in two around them."""


def _empty(_: object, __: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _store(
    bucket: Tensor,
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
    positions: Sequence[int],
) -> None:
    store(bucket, gradients, offsets, strides)
    mark_ready(bucket, positions)


def _nothing(*_: object) -> None:
    pass


BUCKET: Final = define(
    "bucket",
    "(int[] positions, int[] offsets, int numel, ScalarType dtype, Device device) -> Tensor",
    memory_of_bucket,
    fake=_empty,
    tags=_TAGS,
)
"""Memory for gradients that a graph stores together.

Args:
    positions: of the parameters among the tensor inputs of the forward, in the order in which their
        gradients lie. The autograd node that runs says whose they are.
    offsets: of each gradient, in elements.
    numel: of all of them, as are dtype and device.

Returns:
    ``[numel]``, a part of a bucket, or memory of the graph's own.
"""

STORE_GRADIENTS: Final = define(
    "store_gradients_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, int[] positions) -> ()",
    _store,
    meta=_nothing,
    tags=_TAGS,
)
"""Gradients in their places of :data:`BUCKET`'s memory, of which the reducer is told then.

Args:
    bucket: the memory.
    gradients: of any shapes and strides.
    offsets: of their places, in elements.
    strides: of their places, one gradient's after the other's.
    positions: as for :data:`BUCKET`.
"""

MARK_READY: Final = define(
    "mark_ready_",
    "(Tensor(a!) bucket, int[] positions, int[] copied=[], str why='') -> ()",
    mark_ready,
    meta=_nothing,
    tags=_TAGS,
)
"""Tells the reducer that all gradients of :data:`BUCKET`'s memory are stored: they are ready, once
they are copied into the bucket if the memory is the graph's own. In the first round the reducer
learns their order instead, and hooks copy them.

It writes the memory where more is to be added to what the graph has stored: a gradient that exists
already, or what other forwards give of a sum. Declared as a write, it also keeps the memory:
Inductor neither frees nor reuses it before.

Args:
    bucket: the memory.
    positions: as for :data:`BUCKET`.
    copied: those of the positions whose gradients the graph may copy to their places, for the
        report.
    why: a reason for each of these, with ``|`` between them; an empty one if it is not copied.
"""
