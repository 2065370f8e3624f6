"""What a profile says that a module's collectives cost."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import Collective
from fusion_passes.ddp.modules import registry
from fusion_passes.profile.records import Kind, Profile
from fusion_passes.reductions.find import dtype_name
from fusion_passes.torch_private.ddp import parameters_of


def cost_ns(
    ddp: DistributedDataParallel, profile: Profile, sent: Collective, *, one_by_one: bool = False
) -> int:
    """What an all-reduce of some parameters' gradients costs, in nanoseconds.

    Args:
        ddp: their module.
        profile: of its ranks.
        sent: the all-reduce.
        one_by_one: whether each gradient is a tensor of its own.
    """
    dtype: torch.dtype = getattr(torch, sent.dtype)
    operation = "avg" if sent.divided == "by" else "sum"
    mode = "coalesced" if one_by_one else "concat"
    table = profile.table(Kind(dtype_name(dtype.to_real()), operation, mode))
    return table.cost_ns(sent_bytes(ddp, sent), len(sent.parameters) if one_by_one else 1)


def sent_bytes(ddp: DistributedDataParallel, sent: Collective) -> int:
    """The bytes of an all-reduce of some parameters' gradients.

    Args:
        ddp: their module.
        sent: the all-reduce.
    """
    module, parameters = registry.module_of(ddp), parameters_of(ddp)
    elements = sum(
        module.flag_count if number == module.flags else parameters[number].numel()
        for number in sent.parameters
    )
    dtype: torch.dtype = getattr(torch, sent.dtype)
    return elements * dtype.itemsize
