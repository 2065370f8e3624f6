"""A DDP module as its reducer sees it: what it is called, and which state it is in."""

from __future__ import annotations

import enum
import weakref
from typing import Any, Final, NoReturn

from fusion_passes.config import FusionConfig
from fusion_passes.reducer.errors import RefusedGradientError
from fusion_passes.torch_private.ddp import raise_as_ddp

STATE: Final = "_ddp_fusion_state"
"""Attribute of a managed module: its :class:`State`. A forward writes it and does not read it while
Dynamo traces, so that graphs have no guard on it."""


class State(enum.Enum):
    """A managed module is in one of these states.

    ::

             forward            backward           last gradient
        IDLE ------> EXPECTED -----------> RUNNING ------------> IDLE
                                            |   ^
           error, or some gradients missing |   | another backward
                                            v   |
                                         UNFINISHED -- forward --> RuntimeError

    The module's forward moves it to EXPECTED, outside of ``no_sync`` and with gradients enabled.
    The reducer does everything else: RUNNING before the engine runs (or with the first gradient, if
    the package was not called then), IDLE when it finalizes, and UNFINISHED after the engine has
    run. The thread that called the backward finalizes, on the stream that is current there: in a
    callback at the end of the engine's run, or right after it.
    """

    IDLE = "idle"
    EXPECTED = "expected"
    RUNNING = "running"
    UNFINISHED = "unfinished"


class AveragedModule:
    """A DDP module whose gradients a reducer averages. Holds it by a weak reference.

    Attributes:
        label: the name of the module in messages, the same on all ranks.
        group: its process group.
        config: the options of the flag.
    """

    def __init__(self, ddp: Any, label: str, group: Any, config: FusionConfig) -> None:
        self.label = label
        self.group = group
        self.config = config
        self._ddp = weakref.ref(ddp)

    @property
    def ddp(self) -> Any:
        """The module; ``None`` once it is freed."""
        return self._ddp()

    @property
    def state(self) -> State:
        ddp = self._ddp()
        return State.IDLE if ddp is None else getattr(ddp, STATE)

    @state.setter
    def state(self, state: State) -> None:
        ddp = self._ddp()
        if ddp is not None:
            setattr(ddp, STATE, state)

    @property
    def is_expecting(self) -> bool:
        """Whether the next gradients are averaged."""
        return self.state is not State.IDLE

    def refuse(self, text: str) -> NoReturn:
        """Raise a :class:`RefusedGradientError` as the module's own error."""
        raise_as_ddp(self.ddp, RefusedGradientError, text)
