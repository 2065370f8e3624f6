"""Size caps of buckets: from options, from arguments of a DDP module, and by default. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fusion_passes.config import FusionConfig

MIB: Final = 2**20

DEFAULT_BUCKETS: Final = 8
"""Divisor: by default, a cap is the size of a module's gradients divided by this, so about an
eighth of them is all-reduced after the backward (docs/decisions.md has measurements)."""

ALONG_SHARE: Final = 8
"""Divisor: a full bucket also takes gradients that are ready together with its last one, as long as
their total size is less than the cap divided by this."""


@dataclass(frozen=True)
class BucketCaps:
    """Size caps of a DDP module's buckets, in bytes.

    Attributes:
        first_bytes: cap of the first bucket of each dtype and device.
        cap_bytes: cap of every later bucket. The gradient that brings a bucket to its cap closes
            it, so a bucket can exceed its cap by less than the size of that gradient, as in eager
            DDP, plus less than an eighth of the cap for gradients that are ready together with it.
        listed_bytes: caps of the first buckets of each dtype and device, one by one, which replace
            ``first_bytes`` and ``cap_bytes``; the last entry is the cap of all further buckets.
        are_given: whether the user has set them, so that ``"auto"`` makes no larger buckets.
    """

    first_bytes: int
    cap_bytes: int
    listed_bytes: tuple[int, ...] = ()
    are_given: bool = False

    def of_bucket(self, index: int) -> int:
        """The cap of the ``index``-th bucket of one dtype and device, counted from 0."""
        if self.listed_bytes:
            return self.listed_bytes[min(index, len(self.listed_bytes) - 1)]
        return self.cap_bytes if index else self.first_bytes

    def in_mib(self) -> list[float]:
        """All caps in MiB, the unit that users give them in, for people."""
        return [cap / MIB for cap in (self.first_bytes, self.cap_bytes, *self.listed_bytes)]


def mib_to_bytes(size_mb: float) -> int:
    """A size in MiB as whole bytes, rounded down as in DDP."""
    return int(size_mb * MIB)


def given_caps(cap_bytes: int, listed_bytes: Sequence[int] = ()) -> BucketCaps:
    """The caps of a module whose user gave one cap, or a list of caps for its buckets in order."""
    return BucketCaps(cap_bytes, cap_bytes, tuple(listed_bytes), are_given=True)


def default_caps(gradient_bytes: int, least: int, most: int) -> BucketCaps:
    """The caps of a module whose user has set none: from the bytes of all its gradients, and from
    DDP's default caps of the first bucket (``least``) and of later buckets (``most``)."""
    return BucketCaps(least, max(least, min(gradient_bytes // DEFAULT_BUCKETS, most)))


def bucket_caps(config: FusionConfig, module: BucketCaps) -> BucketCaps:
    """The caps of a module's buckets under ``config``: ``bucket_cap_mb`` replaces all caps of
    ``module``, and ``first_bucket_cap_mb`` replaces the cap of the first bucket."""
    caps = module
    if config.bucket_cap_mb is not None:
        caps = given_caps(mib_to_bytes(config.bucket_cap_mb))
    if config.first_bucket_cap_mb is not None:
        first, listed = mib_to_bytes(config.first_bucket_cap_mb), caps.listed_bytes
        listed = (first, *(listed[1:] or (caps.cap_bytes,))) if listed else ()
        caps = replace(caps, first_bytes=first, listed_bytes=listed)
    return caps
