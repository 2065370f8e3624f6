"""The one place that imports private names of torch; Inductor's are in :mod:`.inductor`.

Each name says why it is needed. All of them were checked on torch 2.11.0, 2.13.0 and 2.15.0.
Modules that are slow to import (Dynamo takes about a second) are imported inside functions.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# The flag is an entry of this module: users set it there, and it is part of the cache key.
import torch._inductor.config as inductor_config

# Importing it registers what the functional collectives do with fake tensors.
import torch.distributed._functional_collectives

# A pass must have this base class, and a uuid(), or the FX graph cache is bypassed.
from torch._inductor.custom_graph_pass import CustomGraphPass

# Operators are recognised by their type and decoded by their schema.
from torch._ops import OpOverload

# Fake tensors carry shapes, dtypes and strides of the nodes that a pass adds.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# A second name for a group says in the graph to which DDP module, and to which of its
# parameters, a reduction belongs. Groups are resolved by name when the graph runs.
from torch.distributed.distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _unregister_process_group,
)

# The entries of a torch config module, and the mark of a value that the user has not set.
from torch.utils._config_module import (
    _UNSET_SENTINEL as UNSET,
)
from torch.utils._config_module import (
    _Config as ConfigDefinition,
)
from torch.utils._config_module import (
    _ConfigEntry as ConfigEntry,
)

# Tensor code is written into graphs by a dispatch mode.
from torch.utils._python_dispatch import TorchDispatchMode

# Arguments of a forward can be nested.
from torch.utils._pytree import tree_map_only

__all__ = [  # Of the names that are imported; those that are defined here follow.
    "UNSET",
    "ConfigDefinition",
    "ConfigEntry",
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "ProcessGroup",
    "TorchDispatchMode",
    "inductor_config",
    "tree_map_only",
]


_Function = TypeVar("_Function", bound=Callable[..., Any])

BuiltinCommHookType: Any = torch.distributed.BuiltinCommHookType
"""The communication hooks that DDP's reducer has built in; it has no documented name."""

DEFAULT_FIRST_BUCKET_BYTES: int = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
"""DDP's cap for the first bucket of a module that sets none; it has no public name."""


def clear_backward_cache() -> None:
    """Make compiled autograd forget its graphs: it knows them by their autograd nodes alone."""
    torch._C._dynamo.compiled_autograd.clear_cache()


def below_autograd() -> Any:
    """Context in which operators skip autograd's part of their dispatch, which for the functional
    collectives is written in Python: without it, a wait takes 0.3 ms."""
    return torch._C._AutoDispatchBelowAutograd()


def register_process_group(name: str, group: ProcessGroup) -> None:
    """Give ``group`` one more name, by which compiled graphs can call it."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def unregister_process_group(name: str) -> None:
    """Take a name away again."""
    _unregister_process_group(name)  # type: ignore[arg-type]


def dynamo_config() -> Any:
    """``torch._dynamo.config``: holds ``optimize_ddp`` and ``compiled_autograd``."""
    import torch._dynamo.config

    return torch._dynamo.config


def compiled_autograd() -> Any:
    """``torch._dynamo.compiled_autograd``: its ``_enable`` and ``_disable`` choose, a backward at
    a time, whether hooks are traced into one graph."""
    import torch._dynamo.compiled_autograd

    return torch._dynamo.compiled_autograd


def owner_of_name(name: str) -> tuple[Any, str]:
    """The object that a dotted name of torch is an attribute of, and the attribute's own name.
    Modules are imported for that, and some of Dynamo's are slow to import."""
    path, _, last = name.rpartition(".")
    return pkgutil.resolve_name(path), last


def compile_lock() -> Any:
    """The lock that Dynamo holds while it compiles, reentrant. Compilers switch compiled autograd
    off for a while, and on again if it was on."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def is_compiling_backward() -> bool:
    """Whether a graph that compiled autograd has traced is being compiled or run."""
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return autograd is not None and autograd.in_compiled_autograd_region


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether the parameter is such a one."""
    return bool(getattr(parameter, "_is_flat_param", False))


def ddp_graph_log() -> Any:
    """The log in which DDPOptimizer writes its table of buckets: ``TORCH_LOGS=ddp_graphs``."""
    return torch._logging.getArtifactLogger("torch._dynamo.backends.distributed", "ddp_graphs")


def trace_rules() -> Any:
    """``torch._dynamo.trace_rules``: DDP's constructor adds itself to the inlined modules."""
    import torch._dynamo.trace_rules

    return torch._dynamo.trace_rules


def data_parallel_hooks() -> tuple[Any, ...]:
    """The forward hooks with which DDP, given a ``device_mesh``, puts DTensors in the places of a
    module's local parameters."""
    from torch.distributed.tensor.parallel.ddp import _localize_dtensor, _reconstruct_dtensor

    return _localize_dtensor, _reconstruct_dtensor


def is_in_part_of_mesh(mesh: Any) -> bool:
    """Whether a device mesh is a part of a larger one: DDP makes local tensors of DTensors then."""
    return bool(mesh._get_root_mesh() != mesh)


def is_compiled_forward(node: Any) -> bool:
    """Whether an autograd node belongs to a compiled region."""
    return hasattr(getattr(node, "_forward_cls", None), "maybe_subclass_metadata")


def assume_constant_result(function: Any) -> Any:
    """Dynamo calls the function while it traces and keeps the result as a constant."""
    import torch._dynamo

    return torch._dynamo.assume_constant_result(function)


def disable_dynamo(function: Any) -> Any:
    """Dynamo traces neither the function nor what it calls, until a compiled function is called."""
    import torch._dynamo

    return torch._dynamo.disable(function)


def begin_no_graph(function: _Function) -> _Function:
    """Dynamo begins no graph in the function, but traces what it calls; where a graph that began
    elsewhere calls the function, it is a part of that graph.

    ``torch._dynamo.decorators.skip`` would break that graph.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)
    return function


def is_compiling_graph() -> bool:
    """Whether a graph is being compiled in this thread."""
    from torch._guards import CompileContext

    return CompileContext.try_get() is not None


def without_view_tracking() -> Any:
    """A context in which autograd does not see that a tensor is a view of another."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ExcludeDispatchKeyGuard(key)
