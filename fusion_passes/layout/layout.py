"""In which bucket, and where there, the gradient of each parameter lies. Pure, and the same on
every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Final, TypeAlias

import torch

from fusion_passes.layout.caps import BucketCaps

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
        is_delayed: whether its gradient is launched when the backward has ended, behind all others:
            the parameter is one of ``delay_all_reduce_named_params``.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    is_delayed: bool = False

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
    """Put the pieces of all parameters together to buckets, in the order in which they have come.

    Gradients of several dtypes or devices lie in no bucket together, nor do delayed gradients with
    others: a piece that has such gradients is split. A piece that brings a bucket to its cap closes
    the bucket. Within a bucket, pieces of round sizes come first, so that what lies behind them is
    aligned. Buckets of delayed gradients are launched last.
    """
    open_: dict[_BucketKey, list[Piece]] = {}
    closed: list[list[Piece]] = []
    count: dict[_BucketKey, int] = {}
    for key, piece in itertools.chain.from_iterable(_split(whole, kinds) for whole in pieces):
        if kinds[piece[0]].is_sparse:
            closed.append([piece])
            continue
        bucket = open_.setdefault(key, [])
        bucket.append(piece)
        if _nbytes(bucket, kinds) >= caps.of_bucket(count.get(key, 0)):
            closed.append(open_.pop(key))
            count[key] = count.get(key, 0) + 1
    buckets = [*closed, *open_.values()]
    return lay_out(sorted(buckets, key=lambda bucket: kinds[bucket[0][0]].is_delayed), kinds)


_BucketKey: TypeAlias = tuple[torch.dtype, torch.device, bool, int]
"""What the gradients of a bucket share: dtype, device, whether they are delayed, and the number of
the parameter of a sparse gradient, else -1."""


def _split(piece: Piece, kinds: Mapping[int, GradientKind]) -> list[tuple[_BucketKey, Piece]]:
    """The parts of a piece that can lie in one bucket each, in the order of the piece."""
    parts: dict[_BucketKey, Piece] = {}
    for number in piece:
        kind = kinds[number]
        key = kind.dtype, kind.device, kind.is_delayed, number if kind.is_sparse else -1
        parts[key] = (*parts.get(key, ()), number)
    return list(parts.items())


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
