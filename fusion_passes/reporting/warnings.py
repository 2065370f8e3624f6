"""Warnings for the user, each given once."""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Final

from fusion_passes.state import Lifetime, process_state


class FusionWarning(UserWarning):
    """Something that ``ddp_fusion`` was set for is not done; the text says why, and the remedy."""


_OURS: Final = ("fusion_passes", "torch")

_warned: Final = process_state.keep(
    set[str](), "topics that the user was warned about", Lifetime.PROCESS, reset=set.clear
)

_warned_of: Final = process_state.keep(
    weakref.WeakKeyDictionary[object, set[str]](),
    "topics that the user was warned about, of one DDP module",
    Lifetime.MODULE,
    reset=weakref.WeakKeyDictionary.clear,
)


_texts: Final = process_state.keep(
    list[str](), "what the user was warned of, in order", Lifetime.PROCESS, reset=list.clear
)


def warnings_so_far() -> tuple[str, ...]:
    """What this process has warned of, in order; each text once."""
    return tuple(dict.fromkeys(_texts))


def warn_once(topic: str, text: str, about: object | None = None) -> None:
    """Warn, unless this process was already warned about ``topic``.

    Args:
        topic: what the warning is about.
        text: the warning.
        about: the object that it is about, where others are to be warned of by themselves. It can
            be freed, and what has its address then is another.
    """
    topics = _warned if about is None else _warned_of.setdefault(about, set())
    if topic not in topics:
        topics.add(topic)
        _texts.append(text)
        warnings.warn(text, FusionWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The ``stacklevel`` of the innermost frame that is neither this package's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
