"""Private names of Inductor and of the graphs that it is given. Their modules are slow to import,
and are imported inside functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from fusion_passes.torch_private import ConfigEntry, OpOverload, inductor_config


def inductor_entries() -> dict[str, ConfigEntry]:
    """The entries of ``torch._inductor.config``, by name."""
    return inductor_config._config


def torch_fuses_ddp() -> bool:
    """Whether torch's own fusion of DDP's all-reduces is on."""
    return inductor_config._fuse_ddp_communication


WITHOUT_TORCHS_FUSION: Final[Mapping[str, Any]] = MappingProxyType(
    {"_fuse_ddp_communication": False}
)
"""Options of Inductor that switch torch's own fusion of DDP's all-reduces off."""


def without_torchs_ddp_fusion() -> contextlib.AbstractContextManager[None]:
    """A context in which torch's own fusion of DDP's all-reduces is off. Options of that fusion
    that are set within the context are restored at its end."""
    size = inductor_config._fuse_ddp_bucket_size
    return inductor_config.patch(**WITHOUT_TORCHS_FUSION, _fuse_ddp_bucket_size=size)


def run_observed(
    graph_module: torch.fx.GraphModule, name: str, run: Callable[[torch.fx.Graph], Any]
) -> Any:
    """Call a pass with the module's graph as Inductor calls its own passes: its time is recorded
    under ``name``, by which ``TORCHINDUCTOR_DISABLED_PASSES`` and torch's bisector can switch it
    off. Return the pass's result; ``None`` if it is switched off."""
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    observer = GraphTransformObserver(graph_module, name, subsystem="post_grad_passes")
    return observer.apply_graph_pass(run)


def is_aot_backward(graph: torch.fx.Graph) -> bool:
    """Whether the graph is the backward that AOTAutograd made with a forward."""
    # AOTAutograd's partitioner names the gradients of the outputs like this (torch 2.11 to 2.15).
    return any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text artifact for ``tlparse``, if a trace is being written (``TORCH_TRACE``)."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def control_deps() -> Any:
    """The operator that runs a subgraph after other nodes; Inductor's scheduler keeps that order.
    Called as ``control_deps(nodes to follow, subgraph, *inputs of the subgraph)``."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return control_deps


def make_subgraph(owner: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module for a graph. The module's Python code is generated only when it is first read."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(owner, graph)


def set_output_strides(output: torch.fx.Node, strides: Mapping[int, tuple[int, ...]]) -> None:
    """Set the strides, in elements, that Inductor expects of graph outputs, by output index.
    Inductor has noted the strides from before its passes, and copies an output with others."""
    noted = output.meta.get("original_output_strides")  # None in graphs that Inductor has not seen.
    if noted is not None:
        wanted = [strides.get(index, before) for index, before in enumerate(noted)]
        output.meta["original_output_strides"] = wanted


def donates_buffers() -> bool:
    """Whether a backward may overwrite buffers that its forward saved. If so, Inductor generates
    different code, but the keys of its FX graph cache do not tell (torch 2.11 to 2.15)."""
    import torch._functorch.config

    return bool(torch._functorch.config.donated_buffer)


def inductor_ir() -> Any:
    """``torch._inductor.ir``, Inductor's IR: its ``ConcatKernel`` makes a bucket."""
    import torch._inductor.ir

    return torch._inductor.ir


def inductor_lowerings() -> Any:
    """``torch._inductor.lowering``: the lowerings of division, multiplication and casts."""
    import torch._inductor.lowering

    return torch._inductor.lowering


def graph_lowering() -> Any:
    """The ``GraphLowering`` of the graph that Inductor is lowering."""
    from torch._inductor.virtualized import V

    return V.graph


def register_lowering(target: OpOverload, function: Any) -> None:
    """Register ``function`` as the lowering of an operator. It gets Inductor's IR values in the
    place of the tensors."""
    inductor_lowerings().register_lowering(target, type_promotion_kind=None)(function)


def is_graph_input(value: Any) -> bool:
    """Whether an Inductor IR value is an input of the graph itself, and no copy of one."""
    return isinstance(value.data.data, inductor_ir().InputBuffer)


def lower_as(node: torch.fx.Node, value: Any) -> None:
    """Use an Inductor IR value for a node that is not lowered yet, in place of its lowering: an
    ``fx.Interpreter`` does not run nodes that have a value."""
    graph_lowering().env[node] = value


def run_behind(operation: str, *, buffer: str) -> None:
    """Have Inductor's scheduler run an operation after the one that makes a buffer, whether or not
    the operation reads it. Both are given by name."""
    graph_lowering().additional_star_deps[operation].add(buffer)


def last_collective() -> Any:
    """The operation that launches the collective which was lowered last; ``None`` if there is
    none."""
    from torch._inductor.utils import is_collective

    return next(filter(is_collective, reversed(graph_lowering().operations)), None)


def supports_foreach(device: torch.device) -> bool:
    """Whether Inductor can generate one kernel for tensors of several sizes on this device."""
    from torch._inductor.codegen.common import BackendFeature

    return graph_lowering().has_feature(device, BackendFeature.FOREACH)


def digit(position: Any, stride: Any, size: Any) -> Any:
    """``position // stride % size``, as Inductor's index arithmetic writes it."""
    from torch.utils._sympy.functions import ModularIndexing

    return ModularIndexing(position, stride, size)


def mixes_orders(device: torch.device) -> bool:
    """Whether Inductor may sum over rows and over columns of one tensor in one kernel on this
    device: its *mix-order reduction*, with Triton, since torch 2.10. That rebinds the buffer's name
    to a new tensor, ``buf = workspace.sum(dim=0)``, instead of writing the buffer. A buffer that is
    a part of another one is then never written (pytorch #193061; fixed by #193103, after 2.14.1, by
    a copy into the buffer)."""
    if device.type == "cpu" or graph_lowering().cpp_wrapper:
        return False
    return inductor_config.triton.mix_order_reduction


def is_split_sum(buffer: Any) -> bool:
    """Whether a buffer holds the first half of a reduction that Inductor has split in two. The
    mix-order reduction takes only operations that read such a buffer for the second half."""
    return getattr(buffer, "_split_size", None) is not None


def is_fused_away(buffer: str) -> bool:
    """Whether a buffer, given by name, exists only within one kernel, which does not store it. This
    is known when Inductor generates the code of the operations that follow."""
    return buffer in graph_lowering().removed_buffers


def give_as_code_is_written(operation: Any, last_argument: Callable[[], str]) -> None:
    """Set the last argument of a ``FallbackKernel`` when its code is generated: the argument is a
    text that depends on what Inductor has fused, which the operation's lowering cannot know."""
    write = operation.codegen

    def codegen(wrapper: Any) -> None:
        operation.constant_args = [*operation.constant_args[:-1], last_argument()]
        write(wrapper)

    operation.codegen = codegen
