"""The only package that imports private names of torch. It has a file for each part of torch; this
file has the names that several rooms need.

The comment or docstring of a name says why it is needed. If it names no versions of torch, the name
was checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import pkgutil
from typing import Any

# The flag is an entry of this module: users set it there, and it is part of the cache key.
import torch._inductor.config as inductor_config

# Importing it registers the fake implementations of the functional collectives.
import torch.distributed._functional_collectives  # noqa: F401

# A pass must have this base class, and a uuid(), or the FX graph cache is bypassed.
from torch._inductor.custom_graph_pass import CustomGraphPass

# Operators are recognised by their type and decoded by their schema.
from torch._ops import OpOverload

# Fake tensors carry shapes, dtypes and strides of the nodes that a pass adds.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Collectives are called as methods of process groups.
from torch.distributed.distributed_c10d import ProcessGroup

# The entries of a torch config module, and the value of an entry that the user has not set.
from torch.utils._config_module import _UNSET_SENTINEL as UNSET
from torch.utils._config_module import _Config as ConfigDefinition
from torch.utils._config_module import _ConfigEntry as ConfigEntry

# The text of a graph abbreviates dtypes as torch does: "bf16".
from torch.utils._dtype_abbrs import dtype_abbrs

# A dispatch mode records tensor code in graphs.
from torch.utils._python_dispatch import TorchDispatchMode

# Arguments of a forward can be nested.
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [  # The imported names; the functions of this file follow below.
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
    """The object that has the attribute which a dotted name of torch names, and the attribute's own
    name. Modules are imported to find it, and some of Dynamo's are slow to import."""
    path, _, last = name.rpartition(".")
    return pkgutil.resolve_name(path), last
