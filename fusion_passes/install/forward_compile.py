"""What is different in Inductor's compiles under the flag: the backward that is compiled with a
forward may reduce the gradients of managed modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.ddp.aot_forward import compiling, find_reduced_inputs
from fusion_passes.ddp.turns import is_training_thread
from fusion_passes.flag import active_config
from fusion_passes.install.changes import patched_setting
from fusion_passes.install.store_pass import options_to_store
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
    is_backward = is_compiling_backward()
    if is_backward or _copies_into_lists(model.graph):
        compiler = _without_reinplacing(compiler, options)
    if is_backward:
        return original(compiler, model, inputs, *args, **kwargs)
    if config is not None and config.backward_graph == "reducer":
        # A replayed CUDA graph writes to the memory that it has recorded, and calls no operator:
        # there, and where operators are not lowered, hooks bring the gradients.
        if not any(
            _value_of(name, options) for name in ("triton.cudagraphs", "fallback_by_default")
        ):
            compiler = _with_options(compiler, options_to_store(model.graph, inputs, options))
        return original(compiler, model, inputs, *args, **kwargs)
    if config is None or config.backward_graph == "compiled_autograd" or not _is_usual(options):
        return original(compiler, model, inputs, *args, **kwargs)
    if not torch.is_grad_enabled() or not is_training_thread():
        return original(compiler, model, inputs, *args, **kwargs)
    found = find_reduced_inputs(model.graph, inputs, config)
    if found is None:
        return original(compiler, model, inputs, *args, **kwargs)
    lowering = "torch._functorch.config.force_non_lazy_backward_lowering"
    fill_slot()
    with compiling(found), patched_setting(lowering, True):
        return original(compiler, model, inputs, *args, **kwargs)


def _value_of(name: str, options: Mapping[str, Any]) -> Any:
    """What an option of Inductor is in a compile with these options."""
    if name in options:
        return options[name]
    owner: Any = inductor_config
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def _is_usual(options: Mapping[str, Any]) -> bool:
    """Whether a compiled backward asks before each run whether its collectives are to average: not
    in a replayed CUDA graph, nor where passes are switched off, or operators are not lowered."""
    unusual = ("triton.cudagraphs", "disabled_passes", "fallback_by_default")
    return not any(_value_of(name, options) for name in unusual)


_REINPLACING: Final = "reinplace_inplaceable_ops"
"""Inductor's pass that writes in place what a graph has as a new tensor."""


def _copies_into_lists(graph: fx.Graph) -> bool:
    """Whether a forward does what gives a module its buffers in a compiled step."""
    return bool(graph.find_nodes(op="call_function", target=torch._foreach_copy_, sort=False))


def _without_reinplacing(compiler: Any, options: Mapping[str, Any]) -> Any:
    """The backend as it is, but where operators are called that it lowers otherwise, as in lite
    mode: there Inductor gets two things wrong that are written in place (torch 2.11 to 2.15).

    * Of views, which are calls as well, it loses that what one of them reads was written through
      another: a read comes before the write, and gradients of a traced backward are wrong
      (``tests/tools/test_fuzz.py`` has a case).
    * ``_foreach_copy_`` gives ``None`` where what stood there gave a list: an error of the compile
      (``buffers-called`` in ``tests/equality/test_scenarios.py``).
    """
    if not _value_of("fallback_by_default", options):
        return compiler
    switched_off = ",".join(filter(None, (_value_of("disabled_passes", options), _REINPLACING)))
    return _with_options(compiler, {"disabled_passes": switched_off})


def _with_options(compiler: Any, options: Mapping[str, Any]) -> Any:
    """The backend as it is, but with some options of Inductor."""
    changed = copy.copy(compiler)
    changed.config = {**compiler.config, **options}
    return changed
