"""Communication hooks of DDP that arrive at the same fused form as no hook at all."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import FusionConfig
from fusion_passes.ddp.modules import registry
from fusion_passes.flag import active_config
from fusion_passes.reducer.communication import SENT_AS
from fusion_passes.torch_private.ddp import (
    comm_hooks,
    dtensor_spec,
    log_comm_hook,
    parameters_of,
    register_with_reducer,
)

_STEPS_OPTIMIZER: Final = "_hook_then_optimizer."
"""How the name of the hook of ``_register_fused_optim`` begins."""

_SENT_AS_ATTRIBUTE: Final = "_ddp_fusion_sent_as"
"""Of a managed module: the dtype in which its gradients are sent."""


def is_known(hook: object) -> bool:
    """Whether the hook averages gradients, in their own or a smaller dtype."""
    try:
        return hook in SENT_AS
    except TypeError:  # Not hashable.
        return False


def accept_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object = None) -> None:
    """Let a managed module's gradients be sent as a known hook would send them.

    Raises:
        RuntimeError: the module has a hook already, as in DDP.
    """
    check_comm_hook(ddp)
    note_comm_hook(ddp, hook, state)
    set_sent_as(ddp, SENT_AS[hook])


def check_comm_hook(ddp: DistributedDataParallel) -> None:
    """Refuse a second hook, as DDP does.

    Raises:
        RuntimeError: the module has a hook already.
    """
    if comm_hooks(ddp):
        raise RuntimeError("register_comm_hook can only be called once.")


def note_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object) -> None:
    """Let DDP know of a hook that its reducer does not call."""
    comm_hooks(ddp).append((hook, state))
    log_comm_hook(ddp, _name(hook))


def give_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Register a module's hooks with DDP's own reducer, which it has got since."""
    for hook, state in comm_hooks(ddp):
        register_with_reducer(ddp, hook, state)


def why_not_on_buckets(ddp: DistributedDataParallel, hook: Any) -> str:
    """Why a hook cannot be called with the buckets of a managed module; empty if it can.

    Raises:
        ValueError: the flag's options contradict the hook.
    """
    _check_reduce_dtype(active_config(), hook)
    name = _name(hook)
    if name.startswith(_STEPS_OPTIMIZER):
        return (
            f"its communication hook {name} steps an optimizer while a compiled backward may still "
            "read the parameters. To fuse, step the optimizer after the backward"
        )
    if ddp.static_graph:
        return (
            f"it has static_graph=True and communication hook {name}, which is to be given all "
            "gradients in each step. To fuse, construct it without the option"
        )
    if registry.module_of(ddp).sparse:
        return (
            f"it has sparse gradients and communication hook {name}, which is to be given them. To "
            "fuse, construct its embeddings with sparse=False"
        )
    if any(dtensor_spec(parameter) is not None for parameter in parameters_of(ddp)):
        return f"it has DTensors and communication hook {name}"
    return ""


def check_flag(config: FusionConfig | None) -> None:
    """Refuse options that contradict a hook which is called with a module's buckets.

    Args:
        config: what the flag is about to become.

    Raises:
        ValueError: there is such a hook.
    """
    for ddp in registry.modules():
        if is_hooked(ddp):
            for hook, _ in comm_hooks(ddp):
                _check_reduce_dtype(config, hook)


def _check_reduce_dtype(config: FusionConfig | None, hook: Any) -> None:
    if config is not None and config.reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={config.reduce_dtype!r} of ddp_fusion contradicts communication hook "
            f"{_name(hook)}, which says itself in which dtype gradients are sent. Leave the option "
            "out, or the hook."
        )


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", hook))


_IS_HOOKED: Final = "_ddp_fusion_is_hooked"
"""Of a managed module: whether a hook is called with its buckets."""


def is_hooked(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook is called with the module's buckets, in the place of
    collectives. As :func:`sent_as`, an attribute of the module."""
    hooked: bool = getattr(ddp, _IS_HOOKED)
    return hooked


def set_hooked(ddp: DistributedDataParallel, hooked: bool) -> None:
    """Say whether a communication hook is called with the module's buckets."""
    setattr(ddp, _IS_HOOKED, hooked)


def set_sent_as(ddp: DistributedDataParallel, dtype: torch.dtype | None) -> None:
    """Say in which dtype the module's gradients are sent; ``None``: in their own."""
    setattr(ddp, _SENT_AS_ATTRIBUTE, dtype)


def sent_as(ddp: DistributedDataParallel) -> torch.dtype | None:
    """See :func:`set_sent_as`. An attribute of the module, so that Dynamo, which traces this,
    compiles anew when it changes."""
    dtype: torch.dtype | None = getattr(ddp, _SENT_AS_ATTRIBUTE)
    return dtype
