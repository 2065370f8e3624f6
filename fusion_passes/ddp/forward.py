"""What eager DDP does around the forward of its module, given back to the Python reducer: buffers
are broadcast, and inputs are moved to the module's device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusion_passes.collectives import broadcast
from fusion_passes.ddp.modules import ManagedModule
from fusion_passes.ddp.sync import note_forward
from fusion_passes.torch_private import tree_map_only


def prepare_forward(ddp: DistributedDataParallel, module: ManagedModule) -> list[RemovableHandle]:
    """Registers the hooks that a module needs; they are traced with its forward."""
    handles: list[RemovableHandle] = [ddp.register_forward_hook(note_forward)]
    if ddp.device_ids:
        device = torch.device(ddp.device_type, ddp.device_ids[0])

        def move_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))

        handles.append(ddp.register_forward_pre_hook(move_inputs, with_kwargs=True))
    if not list(ddp.module.buffers()):
        return handles

    def sync_buffers(ddp: Any, _: Any) -> None:
        if ddp.require_forward_param_sync and ddp.broadcast_buffers:
            _broadcast_buffers(ddp, module.group_name)

    def note_sync(ddp: Any, *_: Any) -> None:
        # DDP's rule: buffers are broadcast if the forward before this one was to be synchronised.
        ddp.require_forward_param_sync = torch.is_grad_enabled() and ddp.require_backward_grad_sync

    handles.append(ddp.register_forward_pre_hook(sync_buffers))
    handles.append(ddp.register_forward_hook(note_sync))
    return handles


def _broadcast_buffers(ddp: DistributedDataParallel, group_name: str) -> None:
    """Gives every rank the buffers of rank 0, with one collective for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            flat = broadcast(flat, 0, group_name)
            pieces = flat.split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view(buffer.shape))
