"""Says each thing once."""

from __future__ import annotations

import warnings


class FusionWarning(UserWarning):
    """Something that ``ddp_fusion`` was asked for is not done; the text says why, and the remedy."""


_told: set[str] = set()


def tell_once(topic: str, text: str) -> None:
    """Warns, unless this process was already warned about ``topic``."""
    if topic not in _told:
        _told.add(topic)
        warnings.warn(text, FusionWarning, stacklevel=3)


def forget_told() -> None:
    """Lets every topic be told again."""
    _told.clear()
