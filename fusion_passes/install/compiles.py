"""Adds the package's passes to Inductor's post-grad passes, in compiles that concern a managed
module. One pass stores gradients in buckets, in the backward that is compiled with a forward. The
other fuses the gradient reductions of a backward that compiled autograd has traced. Both use the
options that the modules were constructed with, not the flag's current value."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.sharded.overlap import (
    WAIT_FOR_MODULE,
    wait_before_graph,
    wait_for_inputs,
    waits_of_forward,
)
from fusion_passes.stored.store_pass import StorePass, stores_of_forward
from fusion_passes.torch_private import CustomGraphPass, inductor_config
from fusion_passes.torch_private.dynamo import is_compiling_backward
from fusion_passes.torch_private.inductor import WITHOUT_TORCHS_FUSION
from fusion_passes.torch_private.older_torch import PassChain, takes_one_pass
from fusion_passes.traced.backwards import traced_backwards
from fusion_passes.traced.buckets import CannotLaunchError
from fusion_passes.traced.fuse_pass import FusePass

SLOT: Final = "post_grad_custom_post_pass"
"""Inductor's option for custom passes, which run after its own passes on a post-grad graph."""


def compile_graph(
    original: Callable[..., Any],
    compiler: Any,
    model: fx.GraphModule,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compile a graph of Dynamo's as Inductor's backend of ``torch.compile`` does. Add
    :class:`FusePass` for a traced backward, and :class:`StorePass` for a forward that reads
    parameters of managed modules. The parameters among the inputs are the module's own objects."""
    options = {**compiler.config, **(kwargs.get("config_patches") or {})}
    before_graph = list[int]()
    if model.graph.find_nodes(op="call_function", target=WAIT_FOR_MODULE):
        waits = None
        if compiles_usually(options) and _runs_passes(options):
            waits = waits_of_forward(model.graph, inputs)
        if waits is None:
            compiled = functools.partial(compile_graph, original, compiler)
            return wait_before_graph(compiled, model, inputs, *args, **kwargs)
        compiler = _with_pass(compiler, options, waits)
        options |= compiler.config
        before_graph = waits.before_graph
    config = traced_backwards.config
    if config is not None:
        _check_passes_run(options)
        compiler = _with_pass(compiler, options, FusePass(config), **WITHOUT_TORCHS_FUSION)
    is_forward = not is_compiling_backward() and torch.is_grad_enabled()
    if is_forward and compiles_usually(options):
        stores = stores_of_forward(model.graph, inputs)
        if stores is not None:
            traced_backwards.options = dict(compiler.config)
            compiler = _with_pass(compiler, options, StorePass(stores))
    compiled = original(compiler, model, inputs, *args, **kwargs)
    return wait_for_inputs(compiled, before_graph) if before_graph else compiled


# --- Options of a compile ------------------------------------------------------------------------


def _with_pass(
    compiler: Any, options: Mapping[str, Any], added: CustomGraphPass, **more: Any
) -> Any:
    """A copy of the backend with one more pass, behind those that users have given it, and with
    more options."""
    given = _value_of(SLOT, options)
    if isinstance(given, PassChain):
        passes = [*given.passes, added]
    elif isinstance(given, list | tuple):
        passes = [*given, added]
    else:
        passes = [added] if given is None else [given, added]
    several = PassChain(passes) if takes_one_pass() else passes
    changed = copy.copy(compiler)
    changed.config = {**compiler.config, SLOT: several if len(passes) > 1 else added, **more}
    return changed


def _check_passes_run(options: Mapping[str, Any]) -> None:
    """Refuse to compile a traced backward if Inductor would not run the pass: this rank would
    all-reduce gradients one by one, and other ranks launch buckets."""
    if not _runs_passes(options):
        raise CannotLaunchError(
            "Inductor's use_post_grad_passes or disabled_passes switches the fusion's pass off"
        )


def _runs_passes(options: Mapping[str, Any]) -> bool:
    switched_off = str(_value_of("disabled_passes", options) or "").split(",")
    return _value_of("use_post_grad_passes", options) and SLOT not in switched_off


def compiles_usually(options: Mapping[str, Any]) -> bool:
    """Whether a backward that is compiled with these options can mark its gradients ready. A
    replayed CUDA graph writes to the memory that it has recorded, and calls no operator. There, and
    if operators are not lowered, hooks copy the gradients into buckets."""
    unusual = ("triton.cudagraphs", "fallback_by_default")
    return not any(_value_of(name, options) for name in unusual)


def _value_of(name: str, options: Mapping[str, Any]) -> Any:
    """The value of an option of Inductor in a compile with these options."""
    return options[name] if name in options else operator.attrgetter(name)(inductor_config)
