"""The flag itself: an entry of ``torch._inductor.config`` whose values are checked when they are
set, and acted on at once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Final

from fusion_passes.config import (
    ENVIRONMENT_VARIABLE,
    FusionConfig,
    parse_environment,
    parse_flag,
)
from fusion_passes.torch_private import (
    UNSET,
    ConfigDefinition,
    ConfigEntry,
    inductor_config,
    is_compiling_graph,
)

FLAG: Final = "ddp_fusion"


class _FlagType(type):
    """Type of the flag's values. ``torch.compile`` checks an option with ``isinstance`` and nothing
    else: this is where a wrong ``options={"ddp_fusion": ...}`` is refused before anything runs."""

    def __instancecheck__(cls, value: object) -> bool:
        parse_flag(value, f'torch.compile(options={{"{FLAG}": ...}})')
        return True


class _FlagValue(metaclass=_FlagType):
    pass


class _FlagVariable:
    """The value that the user gave the flag, behind a config entry; checks it, and acts on it.

    Has the interface of the ``ContextVar`` that it stands in for. A thread in which the flag was
    not set sees the value that another has set last: backwards and pipeline stages may run in
    threads of their own.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
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
        # While a graph is compiled, what is set holds for that compile alone.
        if not is_compiling_graph():
            self._process = value
            self.on_change()


class _FlagEntry(ConfigEntry):
    """The flag's entry for torch 2.11, which keeps a user's value as a plain attribute."""

    @property
    def user_override(self) -> Any:
        return _flag_variable.get()

    @user_override.setter
    def user_override(self, value: Any) -> None:
        _flag_variable.set(value)


_flag_variable: Final = _FlagVariable()


def add_flag(on_change: Callable[[], None]) -> None:
    """Adds ``ddp_fusion`` to ``torch._inductor.config``, with the environment's default.

    Args:
        on_change: called now, and whenever the flag has been set for the process.

    Raises:
        ValueError: the environment variable holds no value of the flag.
    """
    entries = inductor_config._config  # type: ignore[attr-defined]
    if FLAG in entries:
        return
    default = parse_environment(os.environ.get(ENVIRONMENT_VARIABLE))
    entry = _make_entry(ConfigDefinition(default=None, value_type=_FlagValue))
    if default is not None:
        entry.env_value_default = default
    entries[FLAG] = entry
    _flag_variable.on_change = on_change
    on_change()


def _make_entry(definition: ConfigDefinition[Any]) -> ConfigEntry:
    if "name" not in inspect.signature(ConfigEntry.__init__).parameters:
        return _FlagEntry(definition)  # type: ignore[call-arg]
    entry = ConfigEntry(definition, FLAG)
    entry.user_override = _flag_variable  # type: ignore[assignment]
    return entry


def active_config() -> FusionConfig | None:
    """The options in force here and now; ``None`` where fusion is off."""
    return parse_flag(getattr(inductor_config, FLAG))
