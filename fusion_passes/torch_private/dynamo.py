"""Private names of Dynamo, and of compiled autograd, which traces and compiles a backward as one
graph. These modules take about a second to import, and are imported inside functions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

_Function = TypeVar("_Function", bound=Callable[..., Any])


# --- Dynamo --------------------------------------------------------------------------------------


def dynamo_config() -> Any:
    """``torch._dynamo.config``, for its options ``optimize_ddp`` and ``compiled_autograd``."""
    import torch._dynamo.config

    return torch._dynamo.config


def trace_rules() -> Any:
    """``torch._dynamo.trace_rules``: DDP's constructor adds DDP to its list of inlined modules."""
    import torch._dynamo.trace_rules

    return torch._dynamo.trace_rules


def is_compiling_graph() -> bool:
    """Whether a graph is being compiled in this thread."""
    from torch._guards import CompileContext

    return CompileContext.try_get() is not None


def begin_no_graph(function: _Function) -> _Function:
    """Have Dynamo begin no graph in the function, but trace the functions that it calls. If a graph
    that began elsewhere calls the function, Dynamo traces it as a part of that graph, which
    ``torch._dynamo.decorators.skip`` would break."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function


def skips_method(function: Any) -> bool:
    """Whether a function is a method in which Dynamo begins no graph, such as ``forward`` of
    ``nn.Sequential``. ``torch.compile`` then begins one in a function that calls the module."""
    return isinstance(function, MethodType) and trace_rules().check(function)


def is_compiled_forward(node: Any) -> bool:
    """Whether an autograd node is that of a compiled forward."""
    return hasattr(getattr(node, "_forward_cls", None), "maybe_subclass_metadata")


# --- Compiled autograd ---------------------------------------------------------------------------


def _compiled_autograd() -> Any:
    import torch._dynamo.compiled_autograd

    return torch._dynamo.compiled_autograd


def is_compiling_backward() -> bool:
    """Whether a graph that compiled autograd has traced is being compiled or run."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return autograd is not None and autograd.in_compiled_autograd_region


def clear_backward_cache() -> None:
    """Make compiled autograd forget its graphs, which it looks up by their autograd nodes alone."""
    torch._C._dynamo.compiled_autograd.clear_cache()


def traces_backwards() -> bool:
    """Whether compiled autograd traces the backwards that begin now."""
    return _compiled_autograd().compiled_autograd_enabled


def tracing_backwards(
    compiler: Callable[[fx.GraphModule], Any],
) -> contextlib.AbstractContextManager[None]:
    """A context in which compiled autograd traces backwards with static sizes, and compiles the
    graphs with ``compiler``."""
    return _compiled_autograd()._enable(compiler, dynamic=False)


def tracing_none() -> contextlib.AbstractContextManager[None]:
    """A context in which compiled autograd traces no backward."""
    return _compiled_autograd()._disable()


def in_one_graph() -> contextlib.AbstractContextManager[None]:
    """A context in which Dynamo raises an error instead of breaking a graph."""
    return torch._dynamo.error_on_graph_break(True)


def is_error_of_a_compile(error: Exception) -> bool:
    """Whether an error comes from a compile: Dynamo could not trace something, refuses it, or
    breaks the graph there, or Dynamo or a compiler behind it has failed in another way."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


@contextlib.contextmanager
def weak_marks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which a ``torch._dynamo.mark_dynamic`` of these tensors has the meaning of
    ``maybe_mark_dynamic``. Both keep a set of dimensions as an attribute (torch 2.11 to 2.15)."""
    strict, weak = "_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"
    marked = {id(tensor): vars(tensor) for tensor in tensors if strict in vars(tensor)}
    before = {number: dict(attributes) for number, attributes in marked.items()}
    for attributes in marked.values():
        attributes[weak] = attributes.pop(strict) | attributes.get(weak, set())
    try:
        yield
    finally:
        for number, attributes in marked.items():
            attributes.pop(weak, None)
            attributes.update(before[number])
