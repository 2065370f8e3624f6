"""Communication hooks of managed modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.own_reducer import refuse_if_sharded
from fusion_passes.reducer.communication import SENT_AS, AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.torch_private.ddp import comm_hooks, log_comm_hook


def call_comm_hook(ddp: DistributedDataParallel, hook: Callable[..., Any], state: object) -> None:
    """Have a managed module call a communication hook with its buckets."""
    _note_comm_hook(ddp, hook, state)
    ref = weakref.ref(ddp)  # Not to the reducer, which _update_process_group replaces.
    reducer = reducer_of(ddp)
    reducer.queue.communication = HookCall(
        hook, state, reducer.parameters.all, lambda: reducer_of(ref()).assignment.layout.with_memory
    )


def check_comm_hook(ddp: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Refuse a communication hook that no reducer can call.

    Raises:
        RuntimeError: the module has a hook already.
        ValueError: the option ``reduce_dtype`` is set, and the hook decides the dtype.
    """
    _check_first(ddp)
    refuse_if_sharded(
        ddp,
        f"communication hook {name_of_hook(hook)}, which would average on all ranks",
        "Use reduce_dtype, or torch's bf16_compress_hook or fp16_compress_hook",
    )
    reduce_dtype = reducer_of(ddp).module.config.reduce_dtype
    if reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={reduce_dtype!r} of ddp_fusion contradicts communication hook "
            f"{name_of_hook(hook)}, which says itself in which dtype gradients are sent. Leave the "
            "option out, or the hook."
        )


def _check_first(ddp: DistributedDataParallel) -> None:
    if comm_hooks(ddp):
        raise RuntimeError("register_comm_hook can only be called once.")


def accept_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object = None) -> None:
    """Send a managed module's gradients as a known hook would send them."""
    _check_first(ddp)
    if SENT_AS[hook] is not None and reducer_of(ddp).module.config.memory == "registered":
        raise ValueError(
            "FusionConfig.memory = 'registered' needs gradients that are sent as they lie, and "
            f"communication hook {name_of_hook(hook)} sends a copy of them. Set memory = 'plain', "
            "or leave the hook out."
        )
    _note_comm_hook(ddp, hook, state)
    communication = reducer_of(ddp).queue.communication
    assert isinstance(communication, AllReduce), "it has no other hook"
    communication.dtype = SENT_AS[hook]


def reason_against_hook(ddp: DistributedDataParallel, name: str) -> str | None:
    """Why DDP's own reducer must call a communication hook; ``None`` if the package's can."""
    if name.startswith("_hook_then_optimizer."):  # The hook of ``_register_fused_optim``.
        return (
            f"its communication hook {name} steps an optimizer while a compiled backward may still "
            "read the parameters. To fuse, step the optimizer after the backward"
        )
    if any(kind.is_sparse for kind in reducer_of(ddp).parameters.kinds.values()):
        return (
            f"it has sparse gradients and communication hook {name}, which is to be given them. To "
            "fuse, construct its embeddings with sparse=False"
        )
    return None


def _note_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object) -> None:
    """Add a communication hook to DDP's list and logging data; DDP's reducer does not call it."""
    comm_hooks(ddp).append((hook, state))
    log_comm_hook(ddp, name_of_hook(hook))
