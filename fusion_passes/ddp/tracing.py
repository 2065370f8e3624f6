"""What compiled autograd cannot trace by itself, where an untraced backward runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import without_view_tracking
from fusion_passes.torch_private.autograd import base_of_view

_READ: Final = "bw_module_fn"


def traceable(tensor: Tensor) -> Tensor:
    """Return what compiled autograd can make a fake tensor of: not a complex view of a real tensor,
    or a real one of a complex, as forwards of complex models save them (torch 2.11 to 2.15).

    Args:
        tensor: an input of a backward.
    """
    base = base_of_view(tensor)
    if base is None or base.is_complex() == tensor.is_complex():
        return tensor
    with without_view_tracking():
        return tensor.detach()


def make_readable(lazy_backward: Any) -> None:
    """Mend how a backward is read from AOTAutograd's cache.

    The cache keeps a backward's graph as Python code, and torch makes a graph of it again by
    tracing it with ``torch.fx`` proxies. An operator without a tensor argument, as
    ``aten.full([8, batch], 0)`` with a symbolic ``batch``, does not see a proxy that is not the
    first in its list, and raises (torch 2.11 to 2.15): a second start of a training with dynamic
    shapes would end in its first backward.

    Args:
        lazy_backward: AOTAutograd's ``_lazy_backward_info`` of a compiled forward. One that was
            compiled in this process has its graph and is left as it is.
    """
    read = getattr(lazy_backward, _READ, None)
    if read is not None and not isinstance(read, _Reading):
        setattr(lazy_backward, _READ, _Reading(_read, read))


class _Reading(functools.partial[Any]):
    """Marks what is mended."""


_readers: Final = process_state.keep(
    set[int](), "the threads that read a backward", Lifetime.CALL, reset=set.clear
)


def _read(read: Callable[[], Any]) -> Any:
    thread = threading.get_ident()
    _readers.add(thread)
    try:
        with _ProxiesInLists():
            return read()
    finally:
        _readers.discard(thread)


def call_module(
    original: Callable[..., Any],
    tracer: fx.Tracer,
    module: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Do what ``torch.fx.Tracer.call_module`` does, but while threads read backwards, only in
    those: a tracer takes the calls of all threads for its own, and ends a training that runs in
    another one with ``NameError: module is not installed as a submodule`` (torch 2.11 to 2.15).
    """
    if _readers and threading.get_ident() not in _readers:
        return forward(*args, **kwargs)
    return original(tracer, module, forward, args, kwargs)


class _ProxiesInLists(TorchFunctionMode):
    """Makes a node of each call with a proxy among its arguments, also in lists of sizes."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        proxies = [value for value in _leaves((args, given)) if isinstance(value, fx.Proxy)]
        if not proxies:
            return function(*args, **given)
        return proxies[0].tracer.create_proxy("call_function", function, args, given)


def _leaves(value: Any) -> Iterator[Any]:
    """All that lies in tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
