"""Cuts the gradients of a backward into pieces that are stored, and marked ready, together. Pure.

A piece is filled in the order of the graph. It is closed by the gradient that brings it to its cap,
and takes along small ones that are ready with that one. Where a module has a layout, its graphs are
cut as that is.
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
from fusion_passes.layout.layout import ALIGNMENT, in_round_order

_Key: TypeAlias = tuple[int, torch.dtype, torch.device]


@dataclass(frozen=True)
class StoredInput:
    """An input of a compiled forward that is a parameter of a DDP module.

    Attributes:
        index: among the inputs of the forward.
        position: among its tensor inputs: the autograd node of the forward has an edge for each.
        module: which of the modules that are found among the inputs, counted from 0.
        shape: of the parameter, as are dtype and device.
        strides: in which its gradient is stored.
        place: index of its bucket, and offset there, where the module has a layout.
    """

    index: int
    position: int
    module: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredPiece:
    """Gradients that are stored together.

    Attributes:
        inputs: of the forward, in the order in which their gradients lie.
        offsets: of each, in elements.
        numel: of all.
    """

    inputs: tuple[StoredInput, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_pieces(
    graph: fx.Graph,
    gradients: Sequence[tuple[StoredInput, fx.Node]],
    caps: Sequence[BucketCaps],
) -> list[StoredPiece]:
    """Cut the gradients of a backward that are stored, each after what it is the gradient of, into
    pieces; with the caps of each module."""
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
    # In the order in which they are full, so that ranks see it as the graph has it.
    order = {id(item): number for number, (item, _) in enumerate(ordered)}
    pieces = [piece for of_key in closed.values() for piece in of_key]
    pieces.sort(key=lambda piece: max(order[id(item)] for item in piece))
    return [*_as_laid_out(laid_out), *map(_placed, pieces)]


def _takes_along(done: Sequence[Sequence[StoredInput]], item: StoredInput, cap: int) -> bool:
    """Whether a full piece takes a gradient along that is ready with what has filled it."""
    size, along = 0, 0
    for member in done[-1]:
        along += member.nbytes if size >= cap else 0
        size += member.nbytes
    return (along + item.nbytes) * ALONG_SHARE < cap


def _levels(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """For each node, how many library kernels have run before it is there, and its position. What
    is generated after a kernel is ready with it."""
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
    return StoredPiece(inputs, tuple(offsets), numel)


def _as_laid_out(items: Sequence[StoredInput]) -> list[StoredPiece]:
    """The parts of each bucket that a graph has: gradients that lie one behind the other."""
    buckets: dict[tuple[int, int], list[StoredInput]] = {}
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
    # The memory begins where it is aligned, before the first of them.
    start = _offset(run[0]) // ALIGNMENT * ALIGNMENT
    offsets = tuple(_offset(item) - start for item in run)
    return StoredPiece(tuple(run), offsets, offsets[-1] + run[-1].numel)


def _offset(item: StoredInput) -> int:
    assert item.place is not None, "a layout has all parameters"
    return item.place[1]
