"""Compiled autograd: has backwards traced, and compiled as one graph. Checked on torch 2.11.0,
2.13.0 and 2.14.1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, fx

from fusion_passes.torch_private import compiled_autograd


def traces_backwards() -> bool:
    """Whether the backwards that begin now are traced."""
    return bool(compiled_autograd().compiled_autograd_enabled)


def tracing_backwards(
    compiler: Callable[[fx.GraphModule], Any], dynamic: bool
) -> contextlib.AbstractContextManager[None]:
    """A context in which compiled autograd traces backwards.

    Args:
        compiler: compiles their graphs.
        dynamic: whether sizes are symbolic.
    """
    context: contextlib.AbstractContextManager[None] = compiled_autograd()._enable(
        compiler, dynamic=dynamic
    )
    return context


def tracing_none() -> contextlib.AbstractContextManager[None]:
    """A context in which no backward is traced."""
    context: contextlib.AbstractContextManager[None] = compiled_autograd()._disable()
    return context


def in_one_graph() -> contextlib.AbstractContextManager[None]:
    """A context in which Dynamo raises an error where it would break a graph."""
    context: contextlib.AbstractContextManager[None] = torch._dynamo.error_on_graph_break(True)
    return context


def is_error_of_a_compile(error: Exception) -> bool:
    """Whether Dynamo could not trace something, refuses it, or breaks the graph there, or it or a
    compiler behind it has come to grief in another way."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


@contextlib.contextmanager
def weak_marks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which ``torch._dynamo.mark_dynamic`` means what ``maybe_mark_dynamic`` does.

    Args:
        tensors: that may be marked.
    """
    marked = {id(tensor): vars(tensor) for tensor in tensors if _STRICT_MARKS in vars(tensor)}
    before = {number: dict(attributes) for number, attributes in marked.items()}
    for attributes in marked.values():
        strict = attributes.pop(_STRICT_MARKS)
        attributes[_WEAK_MARKS] = strict | attributes.get(_WEAK_MARKS, set())
    try:
        yield
    finally:
        for number, attributes in marked.items():
            attributes.pop(_WEAK_MARKS, None)
            attributes.update(before[number])


_STRICT_MARKS: Final = "_dynamo_dynamic_indices"
_WEAK_MARKS: Final = "_dynamo_weak_dynamic_indices"
"""Attributes of tensors: sets of dimensions (torch 2.11 to 2.15)."""
