"""The flag itself: an entry of ``torch._inductor.config`` whose values are checked when they are
set, and acted on at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Final

from fusion_passes.config import ENVIRONMENT_VARIABLE, FusionConfig, parse_environment, parse_flag
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import UNSET, ConfigDefinition, ConfigEntry, inductor_config
from fusion_passes.torch_private.autograd import backward_id
from fusion_passes.torch_private.dynamo import is_compiling_graph
from fusion_passes.torch_private.inductor import inductor_entries
from fusion_passes.torch_private.older_torch import PlainEntry, has_plain_entries

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
    """The value that the user gave the flag, in the place of its config entry's ``ContextVar``;
    checks it, and acts on it. A thread in which the flag was not set sees the value that another
    has set last: backwards and pipeline stages may run in threads of their own."""

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
        if token.var is self._context:  # It was not forgotten meanwhile.
            self._context.reset(token)
            self._changed(self._context.get())

    def forget(self) -> None:
        """Make the flag what the environment says, in all threads, and act on it."""
        self._context = ContextVar(FLAG, default=UNSET)
        self._process = UNSET
        self.on_change()

    def _changed(self, value: Any) -> None:
        # While a graph is compiled, what is set holds for that compile alone. A backward may be
        # compiled when it is run.
        if is_compiling_graph() or backward_id() >= 0:
            self.on_option()
        else:
            self._process = value
            self.on_change()


_flag_variable: Final = process_state.keep(
    _FlagVariable(),
    "what the user has set the flag to",
    Lifetime.PROCESS,
    reset=_FlagVariable.forget,
)


def add_flag(on_change: Callable[[], None], on_option: Callable[[], None]) -> None:
    """Add ``ddp_fusion`` to ``torch._inductor.config``, with the environment's default. Call
    ``on_change`` now, and whenever the flag has been set for the process; ``on_option`` whenever it
    has been set for one compile.

    Raises:
        ValueError: the environment variable holds no value of the flag.
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


def active_config() -> FusionConfig | None:
    """The options in force here and now; ``None`` where fusion is off."""
    return parse_flag(getattr(inductor_config, FLAG))
