"""The custom ops by which a compiled backward calls the reducers: one returns the memory in which
it stores gradients, the others mark the gradients ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fusion_passes.graph.custom_ops import define, store
from fusion_passes.layout.layout import InputPosition, Offset
from fusion_passes.reducer.backward import reducers
from fusion_passes.torch_private.autograd import running_node

_TAGS: Final = (torch.Tag.cudagraph_unsafe,)
"""Inductor splits a CUDA graph around these ops: a replayed graph would not call the reducers."""


def _bucket(
    positions: str, offsets: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    forward = reducers.compiled.get(running_node())
    memory = None
    if forward is not None:
        memory = forward.give_memory(positions, offsets, numel, dtype)
    return torch.empty(numel, dtype=dtype, device=device) if memory is None else memory


def _mark_ready(
    bucket: Tensor, positions: str, copied: Sequence[InputPosition] = (), why: str = ""
) -> None:
    forward = reducers.compiled.get(running_node())
    if forward is not None:
        forward.mark_ready(bucket, positions, copied, why)


def _empty(_: object, __: object, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _store(
    bucket: Tensor,
    gradients: Sequence[Tensor],
    offsets: Sequence[Offset],
    strides: Sequence[int],
    positions: Sequence[InputPosition],
) -> None:
    store(bucket, gradients, offsets, strides)
    _mark_ready(bucket, json.dumps(positions))


def _nothing(*_: object) -> None:
    pass


BUCKET: Final = define(
    "bucket",
    "(str positions, str offsets, int numel, ScalarType dtype, Device device) -> Tensor",
    _bucket,
    fake=_empty,
    tags=_TAGS,
)
"""Returns memory for gradients that a graph stores together.

Args:
    positions: indices of the parameters among the tensor inputs of the forward, in the order in
        which their gradients lie in the memory: a list in JSON. The running autograd node tells
        whose they are. Torch would convert a list of integers one by one in each call.
    offsets: offset of each gradient in the memory, in elements: a list in JSON.
    numel: number of elements of all gradients together.
    dtype: dtype of all gradients.
    device: device of all gradients.

Returns:
    ``[numel]``: a part of a bucket, or memory of the graph's own.
"""

STORE_GRADIENTS: Final = define(
    "store_gradients_",
    "(Tensor(a!) bucket, Tensor[] gradients, int[] offsets, int[] strides, int[] positions) -> ()",
    _store,
    meta=_nothing,
    tags=_TAGS,
)
"""Stores gradients at their places in :data:`BUCKET`'s memory, and marks them ready.

Args:
    bucket: the memory that :data:`BUCKET` returned.
    gradients: the gradients, of any shapes and strides.
    offsets: offset of each gradient's place in the memory, in elements.
    strides: strides of all places, one gradient's after the other's.
    positions: as for :data:`BUCKET`, as integers.
"""

MARK_READY: Final = define(
    "mark_ready_",
    "(Tensor(a!) bucket, str positions, int[] copied=[], str why='') -> ()",
    _mark_ready,
    meta=_nothing,
    tags=_TAGS,
)
"""Tells the reducer that all gradients of :data:`BUCKET`'s memory are stored. The reducer marks
them ready; if the memory is the graph's own, it copies them into the bucket first. In the first
iteration, the reducer only observes their order, and hooks copy them.

The op writes the memory if something must be added to a stored gradient: a ``.grad`` that existed
before, or the parts of a sum that other compiled forwards give. Because the op is declared as a
write, Inductor neither frees nor reuses the memory before it.

Args:
    bucket: the memory that :data:`BUCKET` returned.
    positions: as for :data:`BUCKET`.
    copied: positions of the gradients that the graph may copy to their places, for the report.
    why: a reason for each position in ``copied``, joined by ``|``; an empty one if the graph does
        not copy that gradient.
"""
