"""What the registry of :mod:`fusion_passes.install.patches` says of one change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

CHECKED_ON: Final = ("2.11", "2.13", "2.15")
"""Versions of torch with which the tests pass."""

DDP: Final = "torch.nn.parallel.DistributedDataParallel"


class Span(Enum):
    """How long something is changed."""

    FLAG = "While the flag is set"
    CALL = "During a call"
    OBJECT = "In one object, as long as it is there"
    PROCESS = "Until the process ends"


@dataclass(frozen=True)
class Patch:
    """Something of torch that the package replaces, sets, or adds to.

    Attributes:
        what: its dotted name. Of an object's attributes, the name in its class.
        why: in one sentence.
        span: how long it is changed.
        made: when it is.
        undone: when that is undone; "never" and why it need not be.
        adds: what is added, where the object itself stays what it is.
        checked_on: versions of torch with which it was tested. It is made on others only if it is
            made on all of these.
    """

    what: str
    why: str
    span: Span
    made: str
    undone: str
    adds: str = ""
    checked_on: tuple[str, ...] = CHECKED_ON
