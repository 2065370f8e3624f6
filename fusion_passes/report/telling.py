"""Says each thing once."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Final


class FusionWarning(UserWarning):
    """Something that ``ddp_fusion`` was set for is not done; the text says why, and the remedy."""


_OURS: Final = ("fusion_passes", "torch")
_told: set[str] = set()


def tell_once(topic: str, text: str) -> None:
    """Warns, unless this process was already warned about ``topic``."""
    if topic not in _told:
        _told.add(topic)
        warnings.warn(text, FusionWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The ``stacklevel`` of the innermost frame that is neither this package's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level


def forget_told() -> None:
    """Lets every topic be told again."""
    _told.clear()
