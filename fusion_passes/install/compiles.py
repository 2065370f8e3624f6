"""Adds the package's passes to Inductor's post-grad passes, in compiles that concern a managed
module. One pass stores gradients in buckets, in the backward that is compiled with a forward. The
other fuses the gradient reductions of a backward that compiled autograd has traced. Both use the
options that the modules were constructed with, not the flag's current value."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx

from fusion_passes.config import FusionConfig
from fusion_passes.graph.custom_ops import give_own_memory
from fusion_passes.graph.text import graph_text
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reporting.graphs import compile_log
from fusion_passes.state import process_state
from fusion_passes.stored.lowering import register_store_lowerings
from fusion_passes.stored.pieces import StoredInput
from fusion_passes.stored.store import StoreGradients
from fusion_passes.torch_private import CustomGraphPass, inductor_config
from fusion_passes.torch_private.autograd import gradient_dtype, is_tensor_subclass
from fusion_passes.torch_private.dynamo import is_compiling_backward
from fusion_passes.torch_private.inductor import (
    WITHOUT_TORCHS_FUSION,
    donates_buffers,
    run_observed,
    trace_artifact,
)
from fusion_passes.torch_private.older_torch import PassChain, takes_one_pass
from fusion_passes.traced.backwards import traced_backwards, traced_modules
from fusion_passes.traced.buckets import CannotLaunchError
from fusion_passes.traced.pack import register_lowerings
from fusion_passes.traced.pipeline import run_pipeline
from fusion_passes.traced.plan_report import report_plan
from fusion_passes.version import __version__

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
    return original(compiler, model, inputs, *args, **kwargs)


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
    switched_off = str(_value_of("disabled_passes", options) or "").split(",")
    if not _value_of("use_post_grad_passes", options) or SLOT in switched_off:
        raise CannotLaunchError(
            "Inductor's use_post_grad_passes or disabled_passes switches the fusion's pass off"
        )


def compiles_usually(options: Mapping[str, Any]) -> bool:
    """Whether a backward that is compiled with these options can mark its gradients ready. A
    replayed CUDA graph writes to the memory that it has recorded, and calls no operator. There, and
    if operators are not lowered, hooks copy the gradients into buckets."""
    unusual = ("triton.cudagraphs", "fallback_by_default")
    return not any(_value_of(name, options) for name in unusual)


def _value_of(name: str, options: Mapping[str, Any]) -> Any:
    """The value of an option of Inductor in a compile with these options."""
    return options[name] if name in options else operator.attrgetter(name)(inductor_config)


# --- Passes --------------------------------------------------------------------------------------


class FusePass(CustomGraphPass):
    """Runs the pipeline on a backward that compiled autograd has traced, and records for the report
    what the pipeline did."""

    def __init__(self, config: FusionConfig) -> None:
        self._config = config
        self._modules = traced_modules.identity()

    def __call__(self, graph: fx.Graph) -> None:
        _teach_inductor()
        mode = self._config.reduces_by
        plan = run_pipeline(graph, mode, traced_modules.owner_of, traced_modules.buckets_of)
        give_own_memory(graph)
        if plan.buckets:
            packed = range(len(plan.buckets)) if mode == "concat" else ()
            compile_log.expect(report_plan(plan, self._config.mode), plan.digest(), tuple(packed))

    def uuid(self) -> str:
        """The identity of what this pass does to a graph, for the key of the FX graph cache. It
        includes whether a backward may overwrite buffers that its forward saved, because that key
        does not (torch 2.11 to 2.14)."""
        mode = self._config.mode
        state = [__version__, source_hash(), mode, donates_buffers(), self._modules]
        return hashlib.sha256(repr(state).encode()).hexdigest()


class StorePass(CustomGraphPass):
    """Runs :class:`StoreGradients` on the backward that AOTAutograd has made with a forward. Its
    identity in Inductor's caches is all that it knows of the modules: shapes, places and caps, and
    no names."""

    def __init__(self, stores: StoreGradients) -> None:
        self._stores = stores

    def __call__(self, graph: fx.Graph) -> None:
        _teach_inductor()
        assert graph.owning_module is not None, "a post-grad graph belongs to a module"
        give_own_memory(graph)
        if run_observed(graph.owning_module, type(self._stores).__name__, self._stores):
            trace_artifact("ddp_fusion_stored", lambda: graph_text(graph))

    def uuid(self) -> str:
        """The identity of what this pass does to a graph: see :meth:`FusePass.uuid`."""
        return f"{__version__} {source_hash()} {donates_buffers()} {self._stores.identity()}"


def stores_of_forward(graph: fx.Graph, inputs: Sequence[Any]) -> StoreGradients | None:
    """Make the pass that stores the gradients of a forward's parameters in buckets. Return ``None``
    if no input is a parameter of a managed module, or if AOTAutograd would number the inputs
    differently."""
    num_placeholders = len(graph.find_nodes(op="placeholder"))
    if num_placeholders != len(inputs) or any(map(is_tensor_subclass, inputs)):
        return None
    modules: dict[Reducer, int] = {}
    found: dict[int, StoredInput] = {}
    position, has_some, all_owners = -1, False, reducers.owners()
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            continue
        position += 1
        owners = all_owners.get(id(value), ())
        if len(owners) != 1 or id(value) in found:
            continue
        reducer, number = owners[0]
        has_some = True
        kind = reducer.parameters.kinds[number]
        if kind.is_sparse or kind.is_delayed or gradient_dtype(value) != value.dtype:
            continue
        found[id(value)] = StoredInput(
            index,
            position,
            modules.setdefault(reducer, len(modules)),
            tuple(value.shape),
            tuple(reducer.parameters.strides[number]),
            value.dtype,
            value.device,
            reducer.layout.places[number] if reducer.has_rebuilt_buckets else None,
        )
    if not has_some:
        return None
    caps = tuple(reducer.piece_caps for reducer in modules)
    return StoreGradients(tuple(found.values()), len(inputs), caps)


@process_state.once("whether Inductor knows the package's operators")
def _teach_inductor() -> None:
    """Register the package's lowerings, once, and not before something is compiled: Inductor takes
    a second to import."""
    register_lowerings(compile_log.packed)
    register_store_lowerings()


@process_state.once("a hash of the package's code")
def source_hash() -> str:
    """The hash of all source files of the package."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
