"""How large buckets become: the options, what a DDP module was given, and the defaults. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fusion_passes.config import FusionConfig

MIB: Final = 2**20

DEFAULT_BUCKETS: Final = 8
"""By default, what is sent after the backward is an eighth (docs/decisions.md has measurements)."""

ALONG_SHARE: Final = 8
"""A full bucket takes along what is ready together with it, up to this part of its cap."""

KEPT_ON_CPU_BYTES: Final = 32 * MIB - 4096
"""glibc's largest ``M_MMAP_THRESHOLD`` (mallopt(3)), less a page for what it adds. More is mapped
anew each time, and the kernel clears each page when it is first written: 0.36 ms for a MiB in each
step, where memory that is kept takes 0.02 (docs/decisions.md). No measured cost has that."""


def most_kept_bytes(device_type: str) -> float:
    """Up to how many bytes of a bucket come from memory that is kept from step to step; infinite
    with torch's allocators of other devices than the CPU."""
    return KEPT_ON_CPU_BYTES if device_type == "cpu" else math.inf


@dataclass(frozen=True)
class BucketCaps:
    """Limits of a DDP module's buckets, in bytes.

    Attributes:
        first_bytes: cap of the first bucket of each dtype and device.
        cap_bytes: cap of every later one. A bucket is closed by the gradient that brings it to
            its cap, so it can be larger by less than that gradient, as in eager DDP; and by less
            than an eighth of the cap, for what is ready together with that gradient.
        listed_bytes: caps of the first buckets of each dtype and device one by one, in the place of
            ``first_bytes``; the last one is that of all further buckets.
        most_bytes: of a bucket of several gradients, where buckets are chosen from measurement: the
            cap that the user has set; ``None`` if there is none.
        first_most_bytes: the same for their first buckets; ``None``: as the others.
    """

    first_bytes: int
    cap_bytes: int
    listed_bytes: tuple[int, ...] = ()
    most_bytes: int | None = None
    first_most_bytes: int | None = None

    def of_bucket(self, index: int) -> int:
        """The cap of a bucket of one dtype and device, counted from 0."""
        if self.listed_bytes:
            return self.listed_bytes[min(index, len(self.listed_bytes) - 1)]
        return self.cap_bytes if index else self.first_bytes

    def in_mib(self) -> list[float]:
        """All of them in the unit in which they are given, for people."""
        return [cap / MIB for cap in (self.first_bytes, self.cap_bytes, *self.listed_bytes)]


def mib_to_bytes(size_mb: float) -> int:
    """Whole bytes, rounded down as DDP does."""
    return int(size_mb * MIB)


def given_caps(cap_bytes: int, listed_bytes: Sequence[int] = ()) -> BucketCaps:
    """The caps of a module that the user gave one, or a list for its buckets one by one."""
    # A list bounds each bucket by its own place; the smallest bounds all.
    most = min((cap_bytes, *listed_bytes))
    return BucketCaps(cap_bytes, cap_bytes, tuple(listed_bytes), most)


def default_caps(gradient_bytes: int, least: int, most: int) -> BucketCaps:
    """The caps of a module where the user has set none: of its gradients' bytes, and DDP's defaults
    for a first bucket and for further ones."""
    return BucketCaps(least, max(least, min(gradient_bytes // DEFAULT_BUCKETS, most)))


def bucket_caps(config: FusionConfig, module: BucketCaps) -> BucketCaps:
    """The caps of a module's buckets: ``bucket_cap_mb`` replaces all of the module's own,
    ``first_bucket_cap_mb`` that of its first bucket."""
    caps = module
    if config.bucket_cap_mb is not None:
        caps = given_caps(mib_to_bytes(config.bucket_cap_mb))
    if config.first_bucket_cap_mb is not None:
        first, listed = mib_to_bytes(config.first_bucket_cap_mb), caps.listed_bytes
        listed = (first, *(listed[1:] or (caps.cap_bytes,))) if listed else ()
        caps = replace(caps, first_bytes=first, listed_bytes=listed, first_most_bytes=first)
    return caps
