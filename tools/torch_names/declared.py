"""What the code of the package cannot say of the names of torch that it uses.

A row that no code needs any more is an error of the tool: nothing here can go stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_WRAPPERS: Final = "torch._functorch._aot_autograd.runtime_wrappers"

VERSIONS: Final[Mapping[str, tuple[str, str]]] = {
    "torch._inductor.custom_graph_pass.get_custom_graph_passes": ("2.13", ""),
    "torch._inductor.lowering.add_layout_constraint": ("", "2.13"),
    "torch._inductor.lowering._maybe_layout_constraints": ("", "2.13"),
    "torch.nn.parallel.distributed: batched_grad_copy": ("2.13", ""),
    "torch.nn.parallel.distributed: lazy_bucket_allocation": ("2.15", ""),
}
"""Names that are there, or needed, on some versions only: from the first, and before the second."""

VALUES_OF_ROOM: Final[Mapping[str, str]] = {"lowering": "torch._inductor.ir"}
"""What is annotated ``Any`` in a room: an object of any class in a module."""

STANDS_FOR: Final[Mapping[str, str]] = {"ReducerOfManaged": "torch.distributed.Reducer"}
"""Classes of the package that torch takes for another class: what they define, it must have."""

ATTRIBUTES: Final[Mapping[str, tuple[str, str]]] = {
    "_forward_cls": (
        "torch.autograd.function.Function._backward_cls",
        f"{_WRAPPERS}.CompiledFunction",
    ),
    "_forward_hooks": ("torch.nn.Module", ""),
    "_forward_pre_hooks": ("torch.nn.Module", ""),
    "_sequence_nr": ("torch.autograd.graph.Node", ""),
    "_split_size": ("torch._inductor.ir.ComputedBuffer", ""),
    "_timeout": ("torch._C._distributed_c10d.Backend.Options", ""),
}
"""Attributes of objects that the code does not say the class of: what has them, and what they
hold, if more is asked of that."""

_DDP: Final = "torch.nn.parallel.distributed"

WRITTEN_IN: Final[Mapping[str, str]] = {
    # Attributes that torch gives to objects of other classes.
    "_ddp_params_and_buffers_to_ignore": _DDP,
    "_divide_by_initial_world_size": _DDP,
    "_in_backward_optimizers": "torch.distributed.optim.apply_optimizer_in_backward",
    "_is_flat_param": "torch.distributed.fsdp._flat_param",
    "_st_info": "torch.distributed.tensor.parallel.ddp",
    # Arguments that are looked up by name.
    "batched_grad_copy": _DDP,
    "bucket_cap_mb_list": _DDP,
    "delay_all_reduce_named_params": _DDP,
    "find_unused_parameters": _DDP,
    "gradient_as_bucket_view": _DDP,
    "lazy_bucket_allocation": _DDP,
    "mixed_precision": _DDP,
    "param_to_hook_all_reduce": _DDP,
    # Keys and names of other kinds.
    "ddp_graphs": "torch._logging._registrations",
    "python_reducer": _DDP,
}
"""Names that stand in strings, and the module of torch whose source has them."""
