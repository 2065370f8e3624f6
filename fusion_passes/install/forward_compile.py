"""Lets the backward that is compiled with a forward reduce the gradients of managed modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.ddp.aot_backward import compiling, find_reduced_inputs
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.flag import active_config
from fusion_passes.install.changes import patched_setting
from fusion_passes.torch_private import inductor_config, is_compiling_backward

INDUCTOR: Final = "torch._TorchCompileInductorWrapper"
"""Inductor, as a backend of ``torch.compile``."""


def compile_forward(
    fill_slot: Callable[[], None],
    original: Callable[..., Any],
    compiler: Any,
    model: fx.GraphModule,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Do what Inductor's backend of ``torch.compile`` does with a graph of Dynamo's.

    Args:
        fill_slot: puts the pass among Inductor's, in this thread.
        original: its ``__call__``.
        compiler: the backend.
        model: the graph.
        inputs: what it was traced with: parameters are the module's own.
        args: for the backend.
        kwargs: for the backend.
    """
    config = active_config()
    options = {**compiler.config, **(kwargs.get("config_patches") or {})}
    if config is None or config.backward_graph == "compiled_autograd" or not _is_usual(options):
        return original(compiler, model, inputs, *args, **kwargs)
    if not torch.is_grad_enabled() or is_compiling_backward() or not is_main_thread():
        return original(compiler, model, inputs, *args, **kwargs)
    found = find_reduced_inputs(model.graph, inputs, config)
    if found is None:
        return original(compiler, model, inputs, *args, **kwargs)
    lowering = "torch._functorch.config.force_non_lazy_backward_lowering"
    fill_slot()
    with compiling(found), patched_setting(lowering, True):
        return original(compiler, model, inputs, *args, **kwargs)


def _is_usual(options: Mapping[str, Any]) -> bool:
    """Whether a compiled backward asks before each run whether its collectives are to average: not
    in a replayed CUDA graph, nor where passes are switched off, or operators are not lowered."""

    def value_of(name: str) -> Any:
        if name in options:
            return options[name]
        owner: Any = inductor_config
        for part in name.split("."):
            owner = getattr(owner, part)
        return owner

    unusual = ("triton.cudagraphs", "disabled_passes", "fallback_by_default")
    return not any(map(value_of, unusual))
