"""What is known of a DDP module that is managed, and its names for its process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.plan.caps import ModuleCaps, default_caps, given_caps
from fusion_passes.reductions.hook_pattern import is_dense
from fusion_passes.torch_private import DEFAULT_FIRST_BUCKET_BYTES, backend_name
from fusion_passes.torch_private.ddp import parameters_of

PARAMETER_MARK: Final = "#"
"""Stands between a module's name for its group and a parameter's number."""


@dataclass(frozen=True)
class ManagedModule:
    """A DDP module whose gradients are reduced under the flag.

    Attributes:
        group_name: the module's own name for its process group.
        process_group: the process group's name.
        backend: name of the process group's backend for the module's device.
        world_size: number of ranks of the process group.
        label: for people: number on the group, and class of the wrapped module.
        parameters: names, in the order in which DDP counts them.
        caps: of its buckets: those that DDP was given, or ours for its gradients.
        strides: of each parameter, in which its gradient is sent; contiguous where the parameter
            is not dense, as in DDP.
    """

    group_name: str
    process_group: str
    backend: str
    world_size: int
    label: str
    parameters: tuple[str, ...]
    caps: ModuleCaps
    strides: tuple[tuple[int, ...], ...]

    def name_for(self, index: int) -> str:
        """The group name in the graph for the gradient of parameter ``index``."""
        return f"{self.group_name}{PARAMETER_MARK}{index}"

    def names(self) -> list[str]:
        """All names that the module has for its process group."""
        return [self.group_name, *(self.name_for(index) for index in range(len(self.parameters)))]


def describe(ddp: DistributedDataParallel, number: int) -> ManagedModule:
    """Return what is known of a module that has been constructed.

    Args:
        ddp: the module.
        number: its number on its process group.
    """
    group = ddp.process_group
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return ManagedModule(
        group_name=group_name_of(group, number),
        process_group=group.group_name,
        backend=backend_name(group, torch.device(ddp.device_type)),
        world_size=group.size(),
        label=f"DDP {number} ({type(ddp.module).__name__})",
        parameters=tuple(names[id(parameter)] for parameter in parameters_of(ddp)),
        caps=_caps_of(ddp),
        strides=tuple(map(_strides_to_send, parameters_of(ddp))),
    )


def group_name_of(group: dist.ProcessGroup, number: int) -> str:
    """Return the name that a module has for its process group."""
    return f"{group.group_name}/ddp{number}"


def _caps_of(ddp: DistributedDataParallel) -> ModuleCaps:
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    gradient_bytes = sum(parameter.nbytes for parameter in parameters_of(ddp))
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def _strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    if is_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
