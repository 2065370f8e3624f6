"""In which bucket, and where there, the gradient of each parameter lies. Pure, and the same on
every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Final, TypeAlias

import torch

from fusion_passes.plan.caps import BucketCaps

Piece: TypeAlias = tuple[int, ...]
"""Numbers of parameters whose gradients lie one behind the other, in this order."""

ALIGNMENT: Final = 16
"""Elements: what Inductor asks of an offset to call a pointer aligned; in fp32 a cache line too."""


@dataclass(frozen=True)
class GradientKind:
    """What the layout must know of a parameter.

    Attributes:
        numel: of its gradient, as are the next two.
        is_sparse: whether its gradient is sparse: it has a bucket of its own, and no memory there.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together.

    Attributes:
        index: in the order in which buckets are launched.
        numbers: of the parameters, in the order in which their gradients lie.
        offsets: where each starts, in elements.
        numel: of all of them, as are the next two.
        is_sparse: whether it is the sparse gradient of one parameter.
    """

    index: int
    numbers: Piece
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False


@dataclass(frozen=True)
class Layout:
    """The buckets of a module.

    Attributes:
        buckets: in the order in which they are launched.
        places: index of the bucket, and offset there in elements, by the number of a parameter.
    """

    buckets: tuple[Bucket, ...]
    places: Mapping[int, tuple[int, int]] = field(repr=False)


def plan_layout(
    pieces: Iterable[Piece], kinds: Mapping[int, GradientKind], caps: BucketCaps
) -> Layout:
    """Put whole pieces together to buckets, in the order in which they have come: of all
    parameters, those of a piece of one kind.

    A piece that brings a bucket of its dtype and device to its cap closes it. Within a bucket,
    pieces of round sizes come first, so that what lies behind them is aligned.
    """
    open_: dict[tuple[torch.dtype, torch.device], list[Piece]] = {}
    closed: list[list[Piece]] = []
    count: dict[tuple[torch.dtype, torch.device], int] = {}
    for piece in pieces:
        kind = kinds[piece[0]]
        if kind.is_sparse:
            closed.append([piece])
            continue
        key = kind.dtype, kind.device
        bucket = open_.setdefault(key, [])
        bucket.append(piece)
        if _nbytes(bucket, kinds) >= caps.of_bucket(count.get(key, 0)):
            closed.append(open_.pop(key))
            count[key] = count.get(key, 0) + 1
    return lay_out([*closed, *open_.values()], kinds)


def lay_out(members: Iterable[Sequence[Piece]], kinds: Mapping[int, GradientKind]) -> Layout:
    """The layout of buckets of these pieces, in the order in which they are launched."""
    buckets = tuple(_bucket(index, pieces, kinds) for index, pieces in enumerate(members))
    places = {
        number: (bucket.index, offset)
        for bucket in buckets
        for number, offset in zip(bucket.numbers, bucket.offsets, strict=True)
    }
    return Layout(buckets, MappingProxyType(places))


def in_round_order(numels: Sequence[int]) -> list[int]:
    """The order in which parts of these sizes lie: the rounder a size, the nearer to the start. So
    each is aligned as well as a part of its size can be, without padding that would have to be
    filled, sent, and kept from a check for NaN."""
    return sorted(range(len(numels)), key=lambda index: -_power_of_two_in(numels[index]))


def _bucket(index: int, pieces: Sequence[Piece], kinds: Mapping[int, GradientKind]) -> Bucket:
    sizes = [sum(kinds[number].numel for number in piece) for piece in pieces]
    numbers = tuple(n for place in in_round_order(sizes) for n in pieces[place])
    *offsets, numel = accumulate((kinds[number].numel for number in numbers), initial=0)
    kind = kinds[numbers[0]]
    return Bucket(index, numbers, tuple(offsets), numel, kind.dtype, kind.device, kind.is_sparse)


def _nbytes(pieces: Iterable[Piece], kinds: Mapping[int, GradientKind]) -> int:
    return sum(kinds[number].nbytes for piece in pieces for number in piece)


def _power_of_two_in(number: int) -> int:
    """The largest power of two, up to the alignment, that divides the number."""
    return min(number & -number, ALIGNMENT) if number else ALIGNMENT


# --- As numbers, for a broadcast -----------------------------------------------------------------


def encode(pieces: Iterable[Piece]) -> list[int]:
    """Pieces as numbers, two for each parameter: its own, and that of its piece."""
    return [part for piece, numbers in enumerate(pieces) for n in numbers for part in (n, piece)]


def decode(numbers: Sequence[int]) -> list[Piece]:
    """What :func:`encode` was given."""
    pieces: dict[int, list[int]] = {}
    for number, piece in zip(numbers[::2], numbers[1::2], strict=True):
        pieces.setdefault(piece, []).append(number)
    return [tuple(piece) for piece in pieces.values()]
