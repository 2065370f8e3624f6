"""Private names of Inductor, and of what it is given. They are slow to import, and are imported
inside functions."""

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
"""Options of Inductor with which that is off."""


def without_torchs_ddp_fusion() -> contextlib.AbstractContextManager[None]:
    """A context in which that is off; what is set of it meanwhile is undone at the end."""
    size = inductor_config._fuse_ddp_bucket_size
    return inductor_config.patch(**WITHOUT_TORCHS_FUSION, _fuse_ddp_bucket_size=size)


def run_observed(
    graph_module: torch.fx.GraphModule, name: str, run: Callable[[torch.fx.Graph], Any]
) -> Any:
    """Call a pass with the module's graph as Inductor calls its own: its time stands under its
    name, by which ``TORCHINDUCTOR_DISABLED_PASSES`` and torch's bisector can switch it off. Return
    what it returns; ``None`` if it is switched off."""
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    observer = GraphTransformObserver(graph_module, name, subsystem="post_grad_passes")
    return observer.apply_graph_pass(run)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Leave a text for ``tlparse``, if a trace is being written (``TORCH_TRACE``)."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def control_deps() -> Any:
    """The operator that runs a subgraph after other nodes: Inductor's scheduler keeps that order.
    Called as ``control_deps(nodes to follow, subgraph, *inputs of the subgraph)``."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return control_deps


def make_subgraph(owner: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module for a graph whose Python code is generated only if somebody asks for it."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(owner, graph)


def set_output_strides(output: torch.fx.Node, strides: Mapping[int, tuple[int, ...]]) -> None:
    """Give outputs of a graph, by their numbers, other strides (in elements) than they had before
    its passes. Inductor has written those down, and copies an output that it finds in others."""
    noted = output.meta.get("original_output_strides")  # None in graphs that Inductor has not seen.
    if noted is not None:
        wanted = [strides.get(index, before) for index, before in enumerate(noted)]
        output.meta["original_output_strides"] = wanted


def donates_buffers() -> bool:
    """Whether a backward may overwrite what its forward has saved. Inductor writes other code then,
    and the keys of its FX graph cache do not know it (torch 2.11 to 2.15)."""
    import torch._functorch.config

    return bool(torch._functorch.config.donated_buffer)


def inductor_ir() -> Any:
    """Inductor's intermediate representation: a bucket is made of its ``ConcatKernel``."""
    import torch._inductor.ir

    return torch._inductor.ir


def inductor_lowerings() -> Any:
    """``torch._inductor.lowering``: how Inductor divides, multiplies and casts."""
    import torch._inductor.lowering

    return torch._inductor.lowering


def graph_lowering() -> Any:
    """The graph that Inductor is lowering: its ``GraphLowering``."""
    from torch._inductor.virtualized import V

    return V.graph


def register_lowering(target: OpOverload, function: Any) -> None:
    """Let ``function`` lower an operator; it gets Inductor's values for the tensors."""
    inductor_lowerings().register_lowering(target, type_promotion_kind=None)(function)


def run_behind(operation: str, *, buffer: str) -> None:
    """Have Inductor's scheduler run an operation after the one that makes a buffer, whatever reads
    what. Both are names."""
    graph_lowering().additional_star_deps[operation].add(buffer)


def last_collective() -> Any:
    """The operation that launches the collective which was lowered last; ``None`` without any."""
    from torch._inductor.utils import is_collective

    return next(filter(is_collective, reversed(graph_lowering().operations)), None)


def supports_foreach(device: torch.device) -> bool:
    """Whether Inductor generates one kernel for tensors of several sizes on that device."""
    from torch._inductor.codegen.common import BackendFeature

    return graph_lowering().has_feature(device, BackendFeature.FOREACH)


def digit(position: Any, stride: Any, size: Any) -> Any:
    """``position // stride % size``, as Inductor's index arithmetic writes it."""
    from torch.utils._sympy.functions import ModularIndexing

    return ModularIndexing(position, stride, size)


def mixes_orders(device: torch.device) -> bool:
    """Whether Inductor may sum over rows and over columns of one tensor by one kernel there: its
    *mix-order reduction*, with Triton, since torch 2.10. That ends with a new tensor under the
    buffer's name, ``buf = workspace.sum(dim=0)``: where the buffer is a part of another, nothing
    writes that part (pytorch #193061; mended by #193103, after 2.14.1, by a copy into it)."""
    if device.type == "cpu" or graph_lowering().cpp_wrapper:
        return False
    return inductor_config.triton.mix_order_reduction


def is_split_sum(buffer: Any) -> bool:
    """Whether a buffer has the first half of a reduction that Inductor has split in two. Where it
    mixes orders, it takes what reads the buffer for the second half, and that alone."""
    return getattr(buffer, "_split_size", None) is not None


def is_fused_away(buffer: str) -> bool:
    """Whether a buffer, by its name, lives inside of one kernel alone, which does not store it.
    That is known as the code of what follows is written."""
    return buffer in graph_lowering().removed_buffers


def give_as_code_is_written(operation: Any, last_argument: Callable[[], str]) -> None:
    """Give a ``FallbackKernel`` a text as its last argument that depends on what Inductor has
    fused: the lowering of the operation is too early."""
    write = operation.codegen

    def codegen(wrapper: Any) -> None:
        operation.constant_args = [*operation.constant_args[:-1], last_argument()]
        write(wrapper)

    operation.codegen = codegen
