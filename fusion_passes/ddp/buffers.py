"""Gives every rank the buffers of rank 0, as eager DDP does before a forward."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.graph.collectives import broadcast
from fusion_passes.torch_private.autograd import flattened, unflattened

BUFFERS_IN: Final = "_ddp_fusion_buffers_in"
"""Attribute of a managed module: the name of its group, if it has buffers; else ``None``."""


def prepare_buffers(ddp: DistributedDataParallel, group_name: str) -> None:
    """Let the forwards of a managed module broadcast its buffers, if it has some."""
    has_buffers = any(
        name not in ddp.parameters_to_ignore for name, _ in ddp.module.named_buffers()
    )
    setattr(ddp, BUFFERS_IN, group_name if has_buffers else None)


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether the ranks get buffers before the next forward."""
    is_synced: bool = ddp.require_forward_param_sync and ddp.broadcast_buffers
    return is_synced and getattr(ddp, BUFFERS_IN) is not None


def broadcast_buffers(ddp: DistributedDataParallel, source: int = 0) -> None:
    """Give every rank the buffers of one, with one collective for each dtype and device."""
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced and ddp.process_group.size() == 1:
        return
    group_name = getattr(ddp, BUFFERS_IN)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            pieces = unflattened(broadcast(flattened(buffers), source, group_name), buffers)
            # A forward may have saved one for its backward: autograd sees no change of it, as with
            # DDP's own broadcast.
            torch._foreach_copy_([buffer.data for buffer in buffers], pieces)
