"""The one place that imports private names of torch: a file for each part of it, and here what
several rooms need.

Each name says why it is needed. Where nothing else is said, it was checked on torch 2.11.0, 2.13.0
and 2.15.0.
"""

from __future__ import annotations

import pkgutil
from typing import Any

# The flag is an entry of this module: users set it there, and it is part of the cache key.
import torch._inductor.config as inductor_config

# Importing it registers what the functional collectives do with fake tensors.
import torch.distributed._functional_collectives  # noqa: F401

# A pass must have this base class, and a uuid(), or the FX graph cache is bypassed.
from torch._inductor.custom_graph_pass import CustomGraphPass

# Operators are recognised by their type and decoded by their schema.
from torch._ops import OpOverload

# Fake tensors carry shapes, dtypes and strides of the nodes that a pass adds.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Collectives are called on groups.
from torch.distributed.distributed_c10d import ProcessGroup

# The entries of a torch config module, and the mark of a value that the user has not set.
from torch.utils._config_module import _UNSET_SENTINEL as UNSET
from torch.utils._config_module import _Config as ConfigDefinition
from torch.utils._config_module import _ConfigEntry as ConfigEntry

# A graph as text names dtypes as torch does: "bf16".
from torch.utils._dtype_abbrs import dtype_abbrs

# Tensor code is written into graphs by a dispatch mode.
from torch.utils._python_dispatch import TorchDispatchMode

# Arguments of a forward can be nested.
from torch.utils._pytree import tree_leaves, tree_map_only

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
    "dtype_abbrs",
    "inductor_config",
    "tree_leaves",
    "tree_map_only",
]


def owner_of_name(name: str) -> tuple[Any, str]:
    """The object that a dotted name of torch is an attribute of, and the attribute's own name.
    Modules are imported for that, and some of Dynamo's are slow to import."""
    path, _, last = name.rpartition(".")
    return pkgutil.resolve_name(path), last
