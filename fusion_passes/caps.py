"""How large buckets become. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1024 * 1024

DEFAULT_BUCKETS: Final = 8
"""Into about how many buckets a DDP module's gradients are cut by default: what is sent behind the
backward is an eighth, and nobody pays for more launches than these. docs/bench.md has what was
measured."""

ALONG_SHARE: Final = 8
"""A full bucket takes along what is ready together with it, up to this part of its cap."""


@dataclass(frozen=True)
class BucketCaps:
    """Limits of a DDP module's buckets, in bytes.

    Attributes:
        first_bytes: cap of the first bucket of each key.
        cap_bytes: cap of every later one. A bucket is closed by the reduction that brings it to
            its cap, so it can be larger by less than that reduction, as in eager DDP; and by less
            than an eighth of the cap, for what is ready together with that reduction.
        hold_bytes: a bucket is closed once this many bytes of reductions, of any key, became
            ready since its first one.
        listed_bytes: caps of the first buckets of each key one by one, in the place of
            ``first_bytes``; the last one is that of all further buckets.
    """

    first_bytes: int
    cap_bytes: int
    hold_bytes: int
    listed_bytes: tuple[int, ...] = ()

    def of_bucket(self, index: int) -> int:
        """The cap of a key's bucket, counted from 0."""
        if self.listed_bytes:
            return self.listed_bytes[min(index, len(self.listed_bytes) - 1)]
        return self.cap_bytes if index else self.first_bytes


def default_cap_bytes(gradient_bytes: int, least: int, most: int) -> int:
    """The cap of a module's buckets where the user has set none: the same on all ranks.

    Args:
        gradient_bytes: of all gradients that the module reduces.
        least: DDP's own default for its first bucket.
        most: DDP's own default for further buckets.
    """
    return max(least, min(gradient_bytes // DEFAULT_BUCKETS, most))
