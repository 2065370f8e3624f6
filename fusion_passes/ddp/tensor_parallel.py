"""Tensor parallelism inside a DDP module, in a form that can be traced.

DDP's reducers do not support DTensors. If ``device_mesh`` is one dimension of a larger mesh, DDP
replaces each DTensor by a parameter that is its local shard, and registers two forward hooks, which
are to put DTensors in the place of the shards and to take them out again. The hooks can't be
compiled: Dynamo breaks the graph at them, and makes strides that differ symbolic, and a DTensor
with symbolic strides can't be hashed (``unhashable type: non-nested SymInt``). Nor does the second
hook take anything out: after one forward, the module has lost its parameters, and keeps DTensors
that belong to the autograd graph of that forward.

Here, a module keeps its local parameters, and makes a DTensor whenever its forward reads one of
them. That is traced with the forward, so the backward yields a plain gradient for a plain
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement

from fusion_passes.torch_private.autograd import forward_hooks, own_parameters
from fusion_passes.torch_private.ddp import (
    data_parallel_hooks,
    dtensor_spec,
    ignored_by_ddp,
    is_in_part_of_mesh,
)

_LAYOUTS: Final = "_ddp_fusion_layouts"
"""Attribute of a module that makes DTensors: a :class:`DTensorLayout` by parameter name. The
layouts are an attribute of the module because Dynamo takes numbers in a module's attributes for
constants; elsewhere, it makes numbers that differ symbolic."""


@dataclass(frozen=True)
class DTensorLayout:
    """The properties of a DTensor that its local shard does not have: the tensor-parallel mesh, a
    placement for each mesh dimension, and the shape and stride of the whole tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, _: Any) -> DTensorLayout:
        return self  # DTensor's operators would take a copy of the mesh for another mesh.


def check_dtensors(model: nn.Module, device_mesh: DeviceMesh | None) -> None:
    """Refuse DTensors among the parameters: no reducer can reduce them. If ``device_mesh`` is a
    part of a larger mesh, DDP replaces them by their local shards, and they are accepted.

    Raises:
        ValueError: names a parameter and the remedy.
    """
    if device_mesh is not None and is_in_part_of_mesh(device_mesh):
        return
    ignored = ignored_by_ddp(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and name not in ignored:
            raise ValueError(
                f"Parameter {name!r} is a DTensor, which DistributedDataParallel can reduce only "
                "if it knows the mesh. Give it device_mesh=mesh['dp'], the data-parallel dimension "
                "of the mesh that the model is parallelized over, instead of process_group."
            )


def make_dtensors_when_read(model: nn.Module) -> None:
    """Have the modules in which DDP replaced DTensors by local shards make the DTensors themselves,
    whenever a parameter is read. Remove the two forward hooks that DDP registered for that."""
    kinds: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in model.modules():
        layouts = module.__dict__.get(_LAYOUTS) or _find_layouts(module)
        if not layouts:
            continue
        if _LAYOUTS not in module.__dict__:
            setattr(module, _LAYOUTS, layouts)
            # Modules of one class share the new one: Dynamo would compile each class separately.
            key = type(module), tuple(layouts)
            kinds[key] = kinds.get(key) or _reading_dtensors(*key)
            module.__class__ = kinds[key]
    if not kinds:
        return
    theirs = data_parallel_hooks()
    for table in (table for module in model.modules() for table in forward_hooks(module)):
        for number in [number for number, hook in table.items() if hook in theirs]:
            del table[number]


def _find_layouts(module: nn.Module) -> dict[str, DTensorLayout]:
    return {
        name: DTensorLayout(spec.mesh, tuple(spec.placements), spec.shape, tuple(spec.stride))
        for name, parameter in own_parameters(module).items()
        if parameter is not None and (spec := dtensor_spec(parameter)) is not None
    }


def _reading_dtensors(kind: type, names: tuple[str, ...]) -> type:
    """A subclass of ``kind`` whose instances return DTensors for the parameters ``names``."""
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), same | {name: _property(name) for name in names})


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        parameter = own_parameters(module).get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return parameter
        layout: DTensorLayout = module.__dict__[_LAYOUTS][name]
        return DTensor.from_local(
            parameter,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )

    return property(read)
