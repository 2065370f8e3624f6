"""Private names of Inductor, and of what it is given. Checked on torch 2.11.0, 2.13.0 and 2.15.0.

They are slow to import, and are imported inside functions.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_passes.torch_private import OpOverload


def inductor_counters() -> Any:
    """Inductor's counters: the FX graph cache stores what a compile added to them and adds it
    again on a hit, which is how a process knows what a cached graph holds."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def graph_observer(graph_module: torch.fx.GraphModule, name: str) -> Any:
    """Makes a pass visible to ``TORCHINDUCTOR_DISABLED_PASSES`` and to torch's tracing."""
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    return GraphTransformObserver(graph_module, name, subsystem="post_grad_passes")


def control_deps() -> Any:
    """The operator that runs a subgraph after other nodes: Inductor's scheduler keeps that order.
    Called as ``control_deps(nodes to follow, subgraph, *inputs of the subgraph)``."""
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return control_deps


def make_subgraph(owner: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module for a graph whose Python code is generated only if somebody asks for it."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(owner, graph)


def supports_pass_list() -> bool:
    """Whether ``post_grad_custom_post_pass`` takes a list (torch 2.11 takes one pass only)."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def hash_files(paths: tuple[str, ...]) -> bytes:
    """Hash of the files' contents."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(paths)


def cache_directory() -> str:
    """Where Inductor keeps its caches on this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_ir() -> Any:
    """Inductor's intermediate representation: a bucket is made of its ``ConcatKernel``."""
    import torch._inductor.ir

    return torch._inductor.ir


def inductor_lowerings() -> Any:
    """``torch._inductor.lowering``: how Inductor divides, multiplies and casts."""
    import torch._inductor.lowering

    return torch._inductor.lowering


def graph_lowering() -> Any:
    """The graph that Inductor is lowering."""
    from torch._inductor.virtualized import V

    return V.graph


def register_lowering(target: OpOverload, function: Any) -> None:
    """Lets ``function`` lower an operator; it gets Inductor's values for the tensors."""
    inductor_lowerings().register_lowering(target, type_promotion_kind=None)(function)


def fix_strides_of_lists(target: OpOverload) -> None:
    """Gives an operator on a list of tensors these with the graph's strides.

    Torch 2.11 does so for tensors by themselves only. It reduced a coalesced gradient in another
    layout, and then waited for a copy that it had made of it under way.

    Args:
        target: the operator; its first argument is a list of tensors.
    """
    if torch.__version__ >= "2.13":
        return

    def fix(node: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        require, shapes = inductor_ir().ExternKernel.require_stride_order, graph_lowering().sizevars
        orders = (
            inductor_ir().get_stride_order(source.meta["val"].stride(), shapes.shape_env)
            for source in node.args[0]
        )
        return ([require(*pair) for pair in zip(tensors, orders, strict=True)], *rest), named

    inductor_lowerings().add_layout_constraint(target, fix)


def supports_foreach(device: torch.device) -> bool:
    """Whether Inductor generates one kernel for tensors of several sizes on that device."""
    from torch._inductor.codegen.common import BackendFeature

    return bool(graph_lowering().has_feature(device, BackendFeature.FOREACH))


def digit(position: Any, stride: Any, size: Any) -> Any:
    """``position // stride % size``, as Inductor's index arithmetic writes it."""
    from torch.utils._sympy.functions import ModularIndexing

    return ModularIndexing(position, stride, size)
