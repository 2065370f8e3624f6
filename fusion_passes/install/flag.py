"""The flag itself: an entry of ``torch._inductor.config`` that checks each value when it is set and
acts on it at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Final

from fusion_passes.config import ENVIRONMENT_VARIABLE, parse_environment, parse_flag
from fusion_passes.torch_private import UNSET, ConfigDefinition, ConfigEntry
from fusion_passes.torch_private.autograd import backward_id
from fusion_passes.torch_private.dynamo import is_compiling_graph
from fusion_passes.torch_private.inductor import inductor_entries
from fusion_passes.torch_private.older_torch import PlainEntry, has_plain_entries

FLAG: Final = "ddp_fusion"


class _FlagType(type):
    """Metaclass of the flag's value type. ``torch.compile`` checks an option with ``isinstance``
    alone, so ``__instancecheck__`` refuses a wrong ``options={"ddp_fusion": ...}`` before anything
    runs."""

    def __instancecheck__(cls, value: object) -> bool:
        parse_flag(value, f'torch.compile(options={{"{FLAG}": ...}})')
        return True


class _FlagValue(metaclass=_FlagType):
    pass


class _FlagVariable:
    """Holds the user's value of the flag in place of the config entry's ``ContextVar``, checks each
    new value and acts on it. A thread that has not set the flag sees the value that any thread has
    set last, because backwards and pipeline stages may run in threads of their own."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_option: Callable[[], None] = lambda: None
        self._context: ContextVar[Any] = ContextVar(FLAG, default=UNSET)
        self._process: Any = UNSET

    def get(self) -> Any:
        value = self._context.get()
        return self._process if value is UNSET else value

    def set(self, value: Any) -> Token[Any]:
        if value is not UNSET:
            parse_flag(value)
        token = self._context.set(value)
        self._changed(value)
        return token

    def reset(self, token: Token[Any]) -> None:
        self._context.reset(token)
        self._changed(self._context.get())

    def _changed(self, value: Any) -> None:
        # A value that is set while a graph is compiled holds for that compile alone. backward_id():
        # a compile may also happen while a backward runs.
        if is_compiling_graph() or backward_id() >= 0:
            self.on_option()
        else:
            self._process = value
            self.on_change()


_flag_variable: Final = _FlagVariable()
"""The values that threads of the process have set the flag to."""


def add_flag(on_change: Callable[[], None], on_option: Callable[[], None]) -> None:
    """Add ``ddp_fusion`` to ``torch._inductor.config``, with the environment variable's value as
    its default. Call ``on_change`` now and whenever the flag is set for the process, and
    ``on_option`` whenever it is set for one compile.

    Raises:
        ValueError: the environment variable does not hold a value of the flag.
    """
    entries = inductor_entries()
    if FLAG in entries:
        return
    default = parse_environment(os.environ.get(ENVIRONMENT_VARIABLE))
    definition = ConfigDefinition[Any](default=None, value_type=_FlagValue)
    if has_plain_entries():
        entry: ConfigEntry = PlainEntry(definition, _flag_variable)
    else:
        entry = ConfigEntry(definition, FLAG)
        entry.user_override = _flag_variable  # type: ignore[assignment]
    if default is not None:
        entry.env_value_default = default
    entries[FLAG] = entry
    _flag_variable.on_change, _flag_variable.on_option = on_change, on_option
    on_change()
