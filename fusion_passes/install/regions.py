"""What Dynamo does otherwise under the flag: compiled regions say when they are entered, and a
callback that a hook queues breaks the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from fusion_passes.ddp.backward import BackwardRunner
from fusion_passes.install.changes import temporarily
from fusion_passes.torch_private import compiled_autograd
from fusion_passes.torch_private.autograd import region_is_dynamic

_Translator: TypeAlias = Annotated[Any, "torch._dynamo.symbolic_convert.InstructionTranslatorBase"]


def make_region(
    runner: BackwardRunner,
    original: Callable[..., None],
    region: Annotated[Any, "torch._dynamo.eval_frame.OptimizeContext"],
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Construct an ``OptimizeContext``, as each ``torch.compile`` does. Its regions say when they
    are entered, because a backward takes over their options."""
    original(region, *args, **kwargs)
    rebuild = kwargs.get("rebuild_ctx")
    if rebuild is not None:
        region.enter_exit_hooks.append(
            functools.partial(_enter, runner, rebuild, region_is_dynamic(region))
        )


def _enter(
    runner: BackwardRunner, rebuild: Callable[[], Any], dynamic: bool | None
) -> Callable[[], None]:
    runner.remember_region(rebuild, dynamic)
    return _leave


def _leave() -> None:
    pass


def breaking_at_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the graph break where a hook of a traced backward calls ``queue_callback``, as at
    anything else that cannot be traced, where torch (2.11 to 2.15) has an AssertionError.

    Args:
        original: the method with which Dynamo traces calls of the engine's methods.
    """

    @functools.wraps(original)
    def call_method(self: Any, tx: _Translator, name: str, *args: Any, **kwargs: Any) -> Any:
        autograd = compiled_autograd()
        if name != "queue_callback" or tx.one_graph or not autograd.in_compiled_autograd_region:
            return original(self, tx, name, *args, **kwargs)
        with temporarily("torch._dynamo.compiled_autograd.in_compiled_autograd_region", False):
            return original(self, tx, name, *args, **kwargs)

    return call_method
