"""Tensor parallelism inside a DDP module, in a form that can be traced.

DDP's reducers take no DTensors. Given one dimension of a larger mesh as its ``device_mesh``, DDP
makes a parameter of each DTensor's local shard, and two forward hooks are to put DTensors in their
places and to take them out again. These can't be compiled: Dynamo breaks the graph at them, and
takes strides that differ for symbolic, with which a DTensor can't be hashed (``unhashable type:
non-nested SymInt``). Nor do they take anything out: after one forward, the module has lost its
parameters, and keeps DTensors that hang on the autograd graph of that forward.

Here, a module keeps its local parameters, and a DTensor is made whenever its forward reads one.
That is traced with the forward, so the backward yields a plain gradient for a plain parameter.
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
"""Attribute of a module that makes DTensors: a :class:`Layout` by parameter. It belongs to the
module because Dynamo takes numbers in a module's attributes for constants; elsewhere, it takes
those that differ for symbolic."""


@dataclass(frozen=True)
class Layout:
    """What the local shard of a DTensor does not say of it: the tensor-parallel mesh, a placement
    for each of its dimensions, and the shape and stride of the whole tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, _: Any) -> Layout:
        return self  # To the operators of DTensor, a copy of the mesh would be another mesh.


def check_dtensors(model: nn.Module, device_mesh: DeviceMesh | None) -> None:
    """Refuse DTensors that DDP would take for parameters, which none of its reducers can reduce.
    Given a part of a larger mesh, DDP handles them.

    Raises:
        ValueError: it names a parameter and the remedy.
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
    """Let the modules of a model make DTensors of the local shards that DDP has given them, if it
    has, and remove the two hooks that it has registered for that."""
    kinds: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in model.modules():
        layouts = module.__dict__.get(_LAYOUTS) or _find_layouts(module)
        if not layouts:
            continue
        if _LAYOUTS not in module.__dict__:
            setattr(module, _LAYOUTS, layouts)
            # One class for all modules of a kind, or each would be compiled for itself.
            key = type(module), tuple(layouts)
            kinds[key] = kinds.get(key) or _reading_dtensors(*key)
            module.__class__ = kinds[key]
    if not kinds:
        return
    theirs = data_parallel_hooks()
    for table in (table for module in model.modules() for table in forward_hooks(module)):
        for number in [number for number, hook in table.items() if hook in theirs]:
            del table[number]


def _find_layouts(module: nn.Module) -> dict[str, Layout]:
    return {
        name: Layout(spec.mesh, tuple(spec.placements), spec.shape, tuple(spec.stride))
        for name, parameter in own_parameters(module).items()
        if parameter is not None and (spec := dtensor_spec(parameter)) is not None
    }


def _reading_dtensors(kind: type, names: tuple[str, ...]) -> type:
    """A class like ``kind``, whose instances give DTensors for the parameters ``names``."""
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), same | {name: _property(name) for name in names})


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        parameter = own_parameters(module).get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return parameter
        layout: Layout = module.__dict__[_LAYOUTS][name]
        return DTensor.from_local(
            parameter,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )

    return property(read)
