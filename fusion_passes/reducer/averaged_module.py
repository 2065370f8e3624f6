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

    To EXPECTED: ``_post_forward`` of the module, outside of ``no_sync`` and with gradients enabled;
    ``prepare_for_backward``, which pipelining calls; ``Reducer.expect_more``; and
    ``Reducer._leave_unfinished``, if no gradient was received. To RUNNING:
    ``Reducer.begin_backward`` before the engine runs, or ``Reducer.accumulated`` with the first
    gradient of a backward that was not walked; ``Reducer.reduce_zeros``, with ``join``. To IDLE:
    ``Reducer.finalize`` and ``end_traced_backward``. To UNFINISHED: ``Reducer._leave_unfinished``,
    after the engine has run.

    An iteration is usually finalized in a callback at the end of the engine's run: in the thread
    that ran the last node, which is autograd's own thread if the module is on an accelerator, and
    on the streams that were current where the backward was called. Otherwise it is finalized right
    after the engine's run, in the thread that called the backward.
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
    def name_in_graphs(self) -> str:
        """The name of its process group in traced graphs, without the parameter's number."""
        return f"{self.group.group_name}/{self.label.partition(' (')[0].replace(' ', '').lower()}"

    @property
    def state(self) -> State:
        ddp = self._ddp()
        return State.IDLE if ddp is None else getattr(ddp, STATE)

    @state.setter
    def state(self, state: State) -> None:
        ddp = self._ddp()
        if ddp is not None:
            vars(ddp)[STATE] = state  # ``nn.Module.__setattr__`` takes microseconds.

    @property
    def is_idle(self) -> bool:
        """Whether gradients that come next stay on this rank."""
        return self.state is State.IDLE

    def refuse(self, text: str) -> NoReturn:
        """Raise a :class:`RefusedGradientError` as the module's own error."""
        raise_as_ddp(self.ddp, RefusedGradientError, text)
