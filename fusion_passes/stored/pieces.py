"""Divides the gradients of a backward into pieces that are stored and marked ready together. Pure.

A piece is filled in graph order. The gradient that brings the piece to its cap closes it; small
gradients that are ready together with that gradient still join the piece. Once the buckets of a
module have been rebuilt, the pieces follow its layout instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import fx

from fusion_passes.graph.families import is_library_kernel
from fusion_passes.layout.caps import ALONG_SHARE, BucketCaps
from fusion_passes.layout.layout import (
    ALIGNMENT,
    BucketIndex,
    InputPosition,
    Offset,
    in_round_order,
)

_Key: TypeAlias = tuple[int, torch.dtype, torch.device]


@dataclass(frozen=True)
class StoredInput:
    """An input of a compiled forward that is a parameter of a DDP module.

    Attributes:
        index: index among all inputs of the forward.
        position: index among its tensor inputs, which is also the index of the parameter's edge in
            ``next_functions`` of the forward's autograd node.
        module: index of the DDP module among those that own inputs of the forward.
        shape: shape of the parameter.
        strides: strides in which the gradient is stored, in elements.
        dtype: dtype of the parameter.
        device: device of the parameter.
        place: (index of the bucket, offset in the bucket in elements) of the gradient; ``None``
            before the buckets of the module have been rebuilt.
        owner: see :attr:`fusion_passes.layout.layout.GradientKind.owner`.
    """

    index: int
    position: InputPosition
    module: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: tuple[BucketIndex, Offset] | None = None
    owner: int = -1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredPiece:
    """Gradients that a graph stores together.

    Attributes:
        inputs: the inputs of the forward, in the order in which their gradients lie in memory.
        offsets: offset of each gradient in the memory of the piece, in elements.
        numel: number of elements of that memory.
    """

    inputs: tuple[StoredInput, ...]
    offsets: tuple[Offset, ...]
    numel: int


def plan_pieces(
    graph: fx.Graph,
    gradients: Sequence[tuple[StoredInput, fx.Node]],
    caps: Sequence[BucketCaps],
) -> list[StoredPiece]:
    """Divide the gradients that a backward stores into pieces. ``gradients`` has an (input, node of
    its gradient) pair for each; ``caps`` has the caps of each module."""
    levels = _levels(graph)
    ordered = sorted(gradients, key=lambda item: (levels[item[1]], item[0].position))
    open_: dict[_Key, list[StoredInput]] = {}
    closed: dict[_Key, list[list[StoredInput]]] = {}
    full_at: dict[_Key, int] = {}
    laid_out = [item for item, _ in ordered if item.place is not None]
    ordered = [pair for pair in ordered if pair[0].place is None]
    for item, node in ordered:
        key = item.module, item.dtype, item.device
        level, done = levels[node][0], closed.setdefault(key, [])
        cap = caps[item.module].of_bucket(max(0, len(done) - 1))
        if key not in open_ and done and full_at[key] == level and _takes_along(done, item, cap):
            done[-1].append(item)
            continue
        piece = open_.setdefault(key, [])
        piece.append(item)
        cap = caps[item.module].of_bucket(len(done))
        if sum(member.nbytes for member in piece) >= cap:
            done.append(open_.pop(key))
            full_at[key] = level
    for key, piece in open_.items():
        closed[key].append(piece)
    # In the order in which they are full: then the order that a rank observes is the graph's.
    order = {id(item): number for number, (item, _) in enumerate(ordered)}
    pieces = [piece for of_key in closed.values() for piece in of_key]
    pieces.sort(key=lambda piece: max(order[id(item)] for item in piece))
    parts = (part for piece in pieces for part in _of_each_owner(piece))
    return [*_as_laid_out(laid_out), *map(_placed, parts)]


def _takes_along(done: Sequence[Sequence[StoredInput]], item: StoredInput, cap: int) -> bool:
    """Whether the last full piece also takes ``item``, which is ready together with the gradient
    that filled the piece."""
    size, along = 0, 0
    for member in done[-1]:
        along += member.nbytes if size >= cap else 0
        size += member.nbytes
    return (along + item.nbytes) * ALONG_SHARE < cap


def _of_each_owner(piece: Sequence[StoredInput]) -> list[list[StoredInput]]:
    """The piece split by owner: in a bucket, the gradients of one owner lie together."""
    owners = sorted({item.owner for item in piece})
    return [[item for item in piece if item.owner == owner] for owner in owners]


def _levels(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """For each node, the number of library kernels up to and including it, and its position in the
    graph. Gradients that generated kernels compute after a library kernel are ready with it."""
    levels, kernels = {}, 0
    for position, node in enumerate(graph.nodes):
        if node.op == "call_function" and is_library_kernel(node):
            kernels += 1
        levels[node] = (kernels, position)
    return levels


def _placed(piece: Sequence[StoredInput]) -> StoredPiece:
    order = in_round_order([item.numel for item in piece])
    inputs = tuple(piece[index] for index in order)
    *offsets, numel = accumulate((item.numel for item in inputs), initial=0)
    return StoredPiece(inputs, tuple(map(Offset, offsets)), numel)


def _as_laid_out(items: Sequence[StoredInput]) -> list[StoredPiece]:
    """The pieces of gradients that have a place: one for each run of gradients that lie back to
    back in a bucket."""
    buckets: dict[tuple[int, BucketIndex], list[StoredInput]] = {}
    for item in items:
        assert item.place is not None, "a layout has all parameters"
        buckets.setdefault((item.module, item.place[0]), []).append(item)
    pieces = []
    for members in buckets.values():
        members.sort(key=_offset)
        run: list[StoredInput] = []
        for item in members:
            if run and _offset(run[-1]) + run[-1].numel != _offset(item):
                pieces.append(_in_bucket(run))
                run = []
            run.append(item)
        pieces.append(_in_bucket(run))
    return pieces


def _in_bucket(run: Sequence[StoredInput]) -> StoredPiece:
    # The memory of the piece begins at the aligned offset at or before its first gradient.
    start = _offset(run[0]) // ALIGNMENT * ALIGNMENT
    offsets = tuple(Offset(_offset(item) - start) for item in run)
    return StoredPiece(tuple(run), offsets, offsets[-1] + run[-1].numel)


def _offset(item: StoredInput) -> Offset:
    assert item.place is not None, "a layout has all parameters"
    return item.place[1]
