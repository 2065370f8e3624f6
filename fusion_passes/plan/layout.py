"""Where each gradient of a bucket lies in its buffer, and in which order its elements are sent.
Pure, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ALIGNMENT_BYTES: Final = 64
"""A cache line, and a multiple of what vectorised loads and stores of CPUs and GPUs take."""

ALIGNMENT_ELEMENTS: Final = 16
"""What Inductor asks of an offset, in elements, to call a pointer aligned."""


@dataclass(frozen=True)
class Place:
    """A gradient's place in the buffer.

    Attributes:
        offset: where it starts, in elements.
        strides: in elements; the place is dense.
    """

    offset: int
    strides: tuple[int, ...]


def lay_out(
    numels: Sequence[int],
    strides: Sequence[tuple[int, ...]],
    itemsize: int,
    in_order: bool = False,
) -> tuple[Place, ...]:
    """Places for gradients of some sizes, without a gap between them.

    The rounder a gradient's size, the nearer to the start it lies: first all whose size is a
    multiple of the alignment, then all of a multiple of half of it, and so on. So each place is
    aligned as well as the rows of a gradient of its size can be, and there is no padding that would
    have to be filled, sent, and kept from a check for NaN.

    Args:
        numels: elements of each gradient.
        strides: of each gradient.
        itemsize: of an element, in bytes.
        in_order: whether they lie in the order given, as communication hooks find them.
    """
    alignment = max(ALIGNMENT_BYTES // itemsize, ALIGNMENT_ELEMENTS)
    order = list(range(len(numels)))
    if not in_order:
        order.sort(key=lambda index: -_power_of_two_in(numels[index], alignment))
    offsets = [0] * len(numels)
    offset = 0
    for index in order:
        offsets[index] = offset
        offset += numels[index]
    return tuple(Place(*place) for place in zip(offsets, strides, strict=True))


def as_it_lies(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A contiguous tensor with the elements in the order in which they lie in memory with these
    strides: a view, if ``tensor`` lies so too. Backends take contiguous tensors only.

    Args:
        tensor: of any layout.
        strides: dense.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    if order != sorted(order):
        tensor = tensor.permute(order)
    if not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _power_of_two_in(number: int, limit: int) -> int:
    """The largest power of two, up to ``limit``, that divides the number."""
    return min(number & -number, limit) if number else limit
