"""The backward that AOTAutograd has compiled with a forward: compile it once more, and exchange it.
Checked on torch 2.11.0, 2.13.0 and 2.14.1.

Torch keeps the graph of a backward that it has compiled in this process, with the context of its
compile, since compiled autograd may want it, and compiles the graph at the first backward where
that was not done with the forward. What is here does the same a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch

BACKWARD_COMPILER: Final = "backward_compiler"
"""What a compiled forward's backward has in its closure that holds the compiled graph: from torch
2.13 on. Before, the forward's class itself holds it."""

AOT_CONFIG: Final = "aot_config"
"""What the same closure has before torch 2.13 that knows the compiler."""


def _closed_over(forward: Any, name: str) -> Any:
    """A variable of the function that made the backward of a compiled forward; ``None`` if it does
    not use one of this name."""
    function = forward._backward_impl
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _compiler_of(forward: Any) -> Callable[..., Any] | None:
    holder = _closed_over(forward, BACKWARD_COMPILER) or _closed_over(forward, AOT_CONFIG)
    return getattr(holder, "bw_compiler", None)


def why_not_again(forward: Any) -> str:
    """Why the backward of a compiled forward cannot be compiled once more; empty if it can.

    Args:
        forward: what an autograd node belongs to: AOTAutograd's subclass of ``Function``.
    """
    try:
        from torch._functorch._aot_autograd.runtime_wrappers import AutogradLazyBackwardCompileInfo

        if not isinstance(forward._lazy_backward_info, AutogradLazyBackwardCompileInfo):
            return "its backward came from a cache"
        if forward.num_symints_saved_for_bw > 0:
            return "its shapes are dynamic"  # A second compile may need guards that nobody checks.
        if forward.compiled_bw is not None and _compiler_of(forward) is not None:
            return ""
    except (AttributeError, ImportError):  # A training must not end for that.
        pass
    return "this torch keeps its backward in another way"


def seconds_of_compile(forward: Any) -> float | None:
    """What the compile of a backward has taken; ``None`` where torch has not noted it."""
    nanoseconds = getattr(forward.compiled_bw, "_time_taken_ns", None)
    return nanoseconds / 1e9 if nanoseconds else None


def compile_again(forward: Any) -> Callable[..., Any]:
    """Compile the backward of a compiled forward once more, as torch does it at a first backward.
    Nothing runs what comes of it before :func:`exchange`, and AOTAutograd's cache keeps what it
    has.

    Args:
        forward: one for which :func:`why_not_again` is empty.
    """
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch._dynamo.utils import CompileEventLogger, dynamo_timed, get_metrics_context
    from torch._guards import CompileContext, compile_context, tracing

    lazy, compiler = forward._lazy_backward_info, _compiler_of(forward)
    assert compiler is not None, "why_not_again has been asked"
    with (
        torch.no_grad(),
        tracing(lazy.saved_context),
        compile_context(lazy.saved_compile_context),
        torch._C._DisableAutocast(),
        get_metrics_context(),
        dynamo_timed(
            "backward._backward_impl",
            phase_name="entire_backward_compile",
            log_pt2_compile_event=True,
            dynamo_compile_column_us="backward_cumulative_compile_time_us",
        ),
        callback_handler.install_callbacks(
            CallbackTrigger.LAZY_BACKWARD, str(CompileContext.current_compile_id())
        ),
    ):
        CompileEventLogger.compilation_metric(is_forward=False)
        compiled: Callable[..., Any] = compiler(
            copy.deepcopy(lazy.bw_module), lazy.placeholder_list
        )
    return compiled


def exchange(forward: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiled forward's backwards run another compiled graph from now on.

    Args:
        forward: the forward.
        compiled: of the same graph and inputs.

    Returns:
        What they have run.
    """
    before: Callable[..., Any] = forward.compiled_bw
    holder = _closed_over(forward, BACKWARD_COMPILER)
    if holder is not None:
        holder.compiled_bw = compiled
    forward.compiled_bw = compiled
    return before


def is_error_of_a_compile(error: Exception) -> bool:
    """Whether Dynamo could not trace an operator, or it or a compiler behind it has come to grief
    in another way. Not what it refuses."""
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        InternalTorchDynamoError,
        TorchRuntimeError,
    )

    kinds = (BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError)
    return isinstance(error, kinds)
