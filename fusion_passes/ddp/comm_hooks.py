"""Communication hooks of DDP that arrive at the same fused form as no hook at all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.torch_private import BuiltinCommHookType
from fusion_passes.torch_private.ddp import comm_hooks, log_comm_hook

_SENT_AS: Final[Mapping[object, torch.dtype | None]] = MappingProxyType(
    {
        default_hooks.allreduce_hook: None,
        default_hooks.bf16_compress_hook: torch.bfloat16,
        default_hooks.fp16_compress_hook: torch.float16,
        BuiltinCommHookType.ALLREDUCE: None,
        BuiltinCommHookType.FP16_COMPRESS: torch.float16,
    }
)
"""The dtype in which the gradients are sent that a hook averages; ``None``: in their own."""


_SENT_AS_ATTRIBUTE: Final = "_ddp_fusion_sent_as"
"""Of a managed module: the dtype in which its gradients are sent."""


def is_known(hook: object) -> bool:
    """Whether the hook averages gradients, in their own or a smaller dtype."""
    try:
        return hook in _SENT_AS
    except TypeError:  # Not hashable.
        return False


def accept_comm_hook(ddp: DistributedDataParallel, hook: Any) -> None:
    """Let a managed module's gradients be sent as a known hook would send them.

    Raises:
        RuntimeError: the module has a hook already, as in DDP.
    """
    if comm_hooks(ddp):
        raise RuntimeError("register_comm_hook can only be called once.")
    comm_hooks(ddp).append((hook, None))
    log_comm_hook(ddp, getattr(hook, "__qualname__", str(hook)))
    set_sent_as(ddp, _SENT_AS[hook])


def set_sent_as(ddp: DistributedDataParallel, dtype: torch.dtype | None) -> None:
    """Say in which dtype the module's gradients are sent; ``None``: in their own."""
    setattr(ddp, _SENT_AS_ATTRIBUTE, dtype)


def sent_as(ddp: DistributedDataParallel) -> torch.dtype | None:
    """See :func:`set_sent_as`. An attribute of the module, so that Dynamo, which traces this,
    compiles anew when it changes."""
    dtype: torch.dtype | None = getattr(ddp, _SENT_AS_ATTRIBUTE)
    return dtype
