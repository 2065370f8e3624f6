"""The flag itself: an entry of ``torch._inductor.config`` that checks each value when it is set and
acts on it at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from fusion_passes.config import ENVIRONMENT_VARIABLE, FusionConfig, parse_environment, parse_flag
from fusion_passes.torch_private import UNSET, ConfigDefinition, ConfigEntry, inductor_config
from fusion_passes.torch_private.autograd import backward_id
from fusion_passes.torch_private.dynamo import is_compiling_graph
from fusion_passes.torch_private.inductor import inductor_entries
from fusion_passes.torch_private.older_torch import PlainEntry, has_plain_entries

FLAG: Final = "ddp_fusion"


class _FlagVariable:
    """Holds the user's value of the flag in place of the config entry's ``ContextVar``, checks each
    new value and acts on it. All threads see the value that any thread has set last, because
    backwards and pipeline stages may run in threads of their own."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_option: Callable[[], None] = lambda: None
        self._value: Any = UNSET

    def get(self) -> Any:
        return self._value

    def set(self, value: Any) -> Any:
        if value is not UNSET:
            parse_flag(value)
        before = self._value
        self.reset(value)
        return before

    def reset(self, value: Any) -> None:
        """Set a value that :meth:`set` has returned, or checked."""
        self._value = value
        # A value that is set while a graph is compiled holds for that compile alone. backward_id():
        # a compile may also happen while a backward runs.
        is_of_compile = is_compiling_graph() or backward_id() >= 0
        (self.on_option if is_of_compile else self.on_change)()


_flag_variable: Final = _FlagVariable()
"""What the user has set the flag to."""


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
    definition = ConfigDefinition[Any](default=None, value_type=object)
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
    """The options that the flag has now, in this thread; ``None`` if fusion is off."""
    return parse_flag(getattr(inductor_config, FLAG))
