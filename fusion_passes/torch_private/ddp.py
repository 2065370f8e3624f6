"""Private names of DDP, for managed modules and for modules that DDP's own reducer trains."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn

# DDP.register_comm_hook notes the hook, and calls one of these. Here, the C++ reducer that they
# need may be created after the hook was noted.
from torch.distributed import _register_builtin_comm_hook, _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

USES_PYTHON_REDUCER: Final = "_use_python_reducer"
"""Name of an attribute in a copy's state: whether the Python reducer trains the module."""

BuiltinCommHookType: Any = torch.distributed.BuiltinCommHookType
"""The enum of the communication hooks that are built into DDP's reducer; it is not documented."""

DEFAULT_FIRST_BUCKET_BYTES: int = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
"""DDP's cap for the first bucket of a module that sets no caps, in bytes; it has no public name."""


# --- What a module is made of --------------------------------------------------------------------


def parameters_of(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that DDP reduces, in the order in which it numbers them."""
    return ddp._module_parameters


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The registered communication hooks, each with its state."""
    return ddp._comm_hooks


def ignored_by_ddp(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters and buffers of a model that DDP is to ignore."""
    return tuple(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def dtensor_spec(parameter: nn.Parameter) -> Any:
    """The spec of the DTensor that DDP has replaced by this parameter, its local shard; ``None``
    for other parameters."""
    return getattr(parameter, "_st_info", None)


def data_parallel_hooks() -> tuple[Any, ...]:
    """The forward hooks that DDP registers if it has a ``device_mesh``: one makes local parameters
    of a module's DTensors, the other one puts the DTensors back."""
    from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _reconstruct_dtensor

    return _localize_dtensor, _reconstruct_dtensor


def is_in_part_of_mesh(mesh: Any) -> bool:
    """Whether a device mesh is a part of a larger one. If so, DDP replaces DTensors by their local
    shards."""
    return mesh._get_root_mesh() != mesh


def has_optimizer_in_backward(parameter: nn.Parameter) -> bool:
    """Whether an optimizer steps the parameter within the backward, set up by torch's
    ``_apply_optimizer_in_backward``."""
    return hasattr(parameter, "_in_backward_optimizers")


def delayed_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters given by ``delay_all_reduce_named_params``; a copy of the module has its own
    list."""
    return ddp._delay_all_reduce_params


@contextlib.contextmanager
def none_ignored(model: Any, names: Collection[str]) -> Iterator[None]:
    """A context in which DDP ignores none of the named parameters of a model."""
    ignored = ignored_by_ddp(model)
    if not set(ignored).isdisjoint(names):
        kept = model._ddp_params_and_buffers_to_ignore
        model._ddp_params_and_buffers_to_ignore = [n for n in ignored if n not in names]
        try:
            yield
        finally:
            model._ddp_params_and_buffers_to_ignore = kept
    else:
        yield


# --- What DDP does -------------------------------------------------------------------------------


@contextlib.contextmanager
def registers_no_hooks(ddp: DistributedDataParallel) -> Iterator[None]:
    """A context in which the constructor of a module with DDP's Python reducer registers no hooks
    on the parameters. A parameter would keep the table of removed hooks, which autograd then takes
    the GIL to read in each backward."""
    name = DistributedDataParallel._register_accum_grad_hook.__name__
    vars(ddp)[name] = lambda: None
    try:
        yield
    finally:
        vars(ddp).pop(name, None)


# DDP's own methods, which a managed module replaces.
ddp_logging_data: Final = DistributedDataParallel._get_ddp_logging_data
update_process_group: Final = DistributedDataParallel._update_process_group
set_static_graph: Final = DistributedDataParallel._set_static_graph
register_buffer_comm_hook: Final = DistributedDataParallel._register_buffer_comm_hook


def log_comm_hook(ddp: DistributedDataParallel, name: str) -> None:
    """Write the name of a communication hook into DDP's logging data."""
    assert ddp.logger is not None, "it comes with the reducer"
    ddp.logger._set_comm_hook_name(name)


def register_with_reducer(ddp: DistributedDataParallel, hook: Any, state: object) -> None:
    """Register a communication hook, built-in or not, with DDP's own reducer."""
    if isinstance(hook, BuiltinCommHookType):
        _register_builtin_comm_hook(ddp.reducer, hook)
    else:
        _register_comm_hook(ddp.reducer, state, hook)


def common_rank(ddp: DistributedDataParallel, *, is_candidate: bool) -> int:
    """The highest rank that passes ``is_candidate=True``. All ranks of the module must call this:
    it is a collective."""
    return int(ddp._find_common_rank(dist.get_rank(ddp.process_group), is_candidate))


def tell_joined(ddp: DistributedDataParallel) -> None:
    """Tell ranks that have run out of inputs whether gradients of this step are averaged, by a
    collective."""
    ddp._check_global_requires_backward_grad_sync(is_joined_rank=False)


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ranks may run out of inputs: true from the first ``join`` on, as in DDP."""
    return ddp._join_config.enable


def divides_by_initial_size(ddp: DistributedDataParallel) -> bool:
    """Whether gradients are divided by the number of all ranks, including ranks without inputs."""
    return getattr(ddp, "_divide_by_initial_world_size", True)


def raise_as_ddp(ddp: DistributedDataParallel, kind: type[Exception], text: str) -> NoReturn:
    """Raise an error as DDP raises its own errors, which also records it in DDP's logging data."""
    ddp._log_and_throw(kind, text)
    raise AssertionError("it has raised")


def give_own_reducer(ddp: DistributedDataParallel) -> None:
    """Give a module that was constructed with DDP's Python reducer the C++ reducer, as the
    constructor would have."""
    ddp._use_python_reducer = False
    parameters, is_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, is_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None, "it comes with the reducer"
        ddp.logger._set_static_graph()
