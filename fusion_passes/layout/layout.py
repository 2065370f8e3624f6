"""The layout of a module: the bucket and the offset of each parameter's gradient. Pure, and equal
on all ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NewType, TypeAlias

import torch

from fusion_passes.layout.caps import BucketCaps

ParameterNumber = NewType("ParameterNumber", int)
"""Index of a parameter among all parameters of its module, in DDP's order."""

BucketIndex = NewType("BucketIndex", int)
"""Index of a bucket in the launch order of its module's layout."""

Offset = NewType("Offset", int)
"""Number of elements between the start of a flat buffer and the start of a gradient in it."""

InputPosition = NewType("InputPosition", int)
"""Index of a tensor among the tensor inputs of a compiled forward, which is also the index of its
edge in the ``next_functions`` of the forward's autograd node."""

Piece: TypeAlias = tuple[ParameterNumber, ...]
"""Parameter numbers whose gradients lie back to back, in this order."""

ALIGNMENT: Final = 16
"""Number of elements: Inductor takes a pointer for aligned if its offset is a multiple of this. In
fp32 it is also one cache line."""


@dataclass(frozen=True)
class GradientKind:
    """Properties of a parameter's gradient that the layout depends on.

    Attributes:
        numel: number of elements of the gradient.
        dtype: dtype of the gradient.
        device: device of the gradient.
        is_sparse: whether the gradient is sparse. It then has a bucket of its own without memory.
        is_delayed: whether the gradient is all-reduced after the backward, after all others:
            the parameter is one of ``delay_all_reduce_named_params``.
        owner: rank that alone keeps the average of the gradient; -1 if all ranks keep it.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    is_delayed: bool = False
    owner: int = -1

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


Kinds: TypeAlias = Mapping[ParameterNumber, GradientKind]
"""The kind of each parameter that requires a gradient, by number."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are all-reduced together.

    Attributes:
        index: index of the bucket in launch order.
        numbers: parameter numbers, in the order in which their gradients lie in the bucket.
        offsets: start of each gradient in the bucket, in elements.
        numel: number of elements from the start of the first to the end of the last gradient.
        dtype: dtype of all gradients.
        device: device of all gradients.
        is_sparse: whether the bucket is the sparse gradient of one parameter.
    """

    index: BucketIndex
    numbers: Piece
    offsets: tuple[Offset, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False


@dataclass(frozen=True)
class Layout:
    """The buckets of a module.

    Attributes:
        buckets: the buckets in launch order.
        places: parameter number to (bucket index, offset of its gradient there, in elements).
    """

    buckets: tuple[Bucket, ...]
    places: Mapping[ParameterNumber, tuple[BucketIndex, Offset]] = field(repr=False)
    _starts: dict[tuple[Piece, tuple[Offset, ...]], Offset | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _counts: dict[Piece, Counter[BucketIndex]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def start(self, numbers: Piece, offsets: tuple[Offset, ...]) -> Offset | None:
        """Where a flat buffer begins in its bucket, in elements, if gradients lie in the buffer at
        these offsets; ``None`` if the layout places them differently. Looked up after the first
        call, which is by parameter."""
        if (numbers, offsets) not in self._starts:
            index, first = self.places[numbers[0]]
            start = Offset(first - offsets[0])
            places = [(index, start + offset) for offset in offsets]
            is_there = start >= 0 and places == [self.places[number] for number in numbers]
            self._starts[numbers, offsets] = start if is_there else None
        return self._starts[numbers, offsets]

    def counts(self, numbers: Piece) -> Counter[BucketIndex]:
        """How many of these gradients each bucket has. Looked up as in :meth:`start`."""
        if numbers not in self._counts:
            self._counts[numbers] = Counter(self.places[number][0] for number in numbers)
        return self._counts[numbers]

    @property
    def with_memory(self) -> list[BucketIndex]:
        """The indices of the buckets that have memory: neither sparse nor empty ones."""
        return [b.index for b in self.buckets if b.numel and not b.is_sparse]


def plan_layout(pieces: Iterable[Piece], kinds: Kinds, caps: BucketCaps) -> Layout:
    """Put the pieces of all parameters into buckets, in the given order.

    Gradients of a bucket have one dtype and one device, and either all or none of them are delayed:
    a piece with several kinds of gradients is split. The piece that brings a bucket to its cap
    closes it. Within a bucket, pieces whose size is divisible by a larger power of two come first,
    so that the pieces after them are aligned. Buckets of delayed gradients are launched last.

    A piece of gradients with several owners is split too, but its parts may share a bucket. A
    bucket holds the gradients of each owner together, owners in the order of their ranks, and each
    owner's first gradient begins at a multiple of :data:`ALIGNMENT` elements.
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
"""Key that all gradients of a bucket share: dtype, device, whether they are delayed, and the
parameter number if the gradient is sparse, otherwise -1."""


def _split(piece: Piece, kinds: Kinds) -> list[tuple[_BucketKey, Piece]]:
    """The piece split by bucket key and owner; each part keeps the order of the piece."""
    parts: dict[tuple[_BucketKey, int], Piece] = {}
    for number in piece:
        kind = kinds[number]
        key = kind.dtype, kind.device, kind.is_delayed, number if kind.is_sparse else -1
        parts[key, kind.owner] = (*parts.get((key, kind.owner), ()), number)
    return [(key, part) for (key, _), part in parts.items()]


def lay_out(members: Iterable[Sequence[Piece]], kinds: Kinds) -> Layout:
    """The layout whose buckets, in launch order, have these pieces."""
    buckets = tuple(
        _bucket(BucketIndex(index), pieces, kinds) for index, pieces in enumerate(members)
    )
    places = {
        number: (bucket.index, offset)
        for bucket in buckets
        for number, offset in zip(bucket.numbers, bucket.offsets, strict=True)
    }
    return Layout(buckets, MappingProxyType(places))


def in_round_order(numels: Sequence[int]) -> list[int]:
    """The order of parts with these sizes, as indices: the larger the power of two (at most
    ``ALIGNMENT``) that divides a size, the earlier. Each part is then aligned as well as its size
    allows, without padding, which would have to be filled, sent, and skipped by a NaN check."""
    return sorted(range(len(numels)), key=lambda index: -_power_of_two_in(numels[index]))


def _bucket(index: BucketIndex, pieces: Sequence[Piece], kinds: Kinds) -> Bucket:
    sizes = [sum(kinds[number].numel for number in piece) for piece in pieces]
    order = sorted(in_round_order(sizes), key=lambda place: kinds[pieces[place][0]].owner)
    numbers = tuple(n for place in order for n in pieces[place])
    kind = kinds[numbers[0]]
    offsets, numel, owner = list[Offset](), 0, kind.owner
    for number in numbers:
        if kinds[number].owner != owner:
            numel, owner = -(-numel // ALIGNMENT) * ALIGNMENT, kinds[number].owner
        offsets.append(Offset(numel))
        numel += kinds[number].numel
    return Bucket(index, numbers, tuple(offsets), numel, kind.dtype, kind.device, kind.is_sparse)


def _nbytes(pieces: Iterable[Piece], kinds: Kinds) -> int:
    return sum(kinds[number].nbytes for piece in pieces for number in piece)


def _power_of_two_in(number: int) -> int:
    """The largest power of two, at most ``ALIGNMENT``, that divides the number."""
    return min(number & -number, ALIGNMENT) if number else ALIGNMENT


# --- Encoding for a broadcast --------------------------------------------------------------------


def encode(pieces: Iterable[Piece]) -> list[int]:
    """Pieces as integers, two for each parameter: its number, and the index of its piece."""
    return [part for piece, numbers in enumerate(pieces) for n in numbers for part in (n, piece)]


def decode(numbers: Sequence[int]) -> list[Piece]:
    """The pieces that :func:`encode` was given."""
    pieces: dict[int, list[ParameterNumber]] = {}
    for number, piece in zip(numbers[::2], numbers[1::2], strict=True):
        pieces.setdefault(piece, []).append(ParameterNumber(number))
    return [tuple(piece) for piece in pieces.values()]
