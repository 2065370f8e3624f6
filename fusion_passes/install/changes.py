"""Changes what the registry lists, and nothing else, and undoes it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Final, cast

from fusion_passes.install.patch import Span
from fusion_passes.install.patches import find
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import owner_of_name
from fusion_passes.torch_private.dynamo import disable_dynamo

replaced: Final = process_state.keep(
    dict[str, object](),
    "what has been in the place of all that the flag has replaced, by name: once it is unset, that "
    "must be there again",
    Lifetime.PROCESS,
    reset=dict.clear,
)


def replace(undo: contextlib.ExitStack, what: str, value: object) -> None:
    """Put ``value`` in the place of what a dotted name of torch stands for.

    Args:
        undo: puts it back, unless somebody has put something else there since: that stays.
        what: a name in the registry.
        value: what takes its place.

    Raises:
        LookupError: there is no such entry in the registry.
    """
    owner, name = _find(what, Span.FLAG)
    replaced[what] = getattr(owner, name)
    original = inspect.getattr_static(owner, name)
    if isinstance(original, staticmethod):
        value = staticmethod(cast("Callable[..., Any]", value))
    setattr(owner, name, value)

    def restore() -> None:
        if inspect.getattr_static(owner, name) is value:
            setattr(owner, name, original)

    undo.callback(restore)


def wrap(undo: contextlib.ExitStack, what: str, replacement: Callable[..., Any]) -> None:
    """Replace a function by ``replacement``, which is called with the original first. A compiled
    region that calls it runs it as it is. Once it is undone, who still calls it gets the
    original."""
    original = value_of(what)
    is_undone = threading.Event()

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_undone.is_set():
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    undo.callback(is_undone.set)
    replace(undo, what, disable_dynamo(patched))


def set_to(undo: contextlib.ExitStack, what: str, value: object) -> None:
    """Give a setting a value; ``undo`` gives it the one that it has now."""
    undo.callback(write, what, value_of(what))
    write(what, value)


def value_of(what: str) -> Any:
    """What is in the place of an entry of the registry now."""
    owner, name = _find(what, *Span)
    return getattr(owner, name)


def write(what: str, value: object) -> None:
    """Give a setting a value, which the caller undoes."""
    owner, name = _find(what, Span.FLAG)
    setattr(owner, name, value)


def patched_setting(what: str, value: object) -> contextlib.AbstractContextManager[None]:
    """Set an entry of one of torch's config modules during a call, as these do it themselves."""
    owner, name = _find(what, Span.CALL, Span.FLAG)
    patch: contextlib.AbstractContextManager[None] = owner.patch(**{name: value})
    return patch


def _find(what: str, *spans: Span) -> tuple[Any, str]:
    return owner_of_name(find(what, *spans).what)
