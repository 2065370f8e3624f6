"""Communication hooks of DDP that arrive at the same fused form as no hook at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.torch_private import BuiltinCommHookType

Hook = Callable[[Any, dist.GradBucket], Any]

_SENT_AS: Final[Mapping[object, torch.dtype | None]] = {
    default_hooks.allreduce_hook: None,
    default_hooks.bf16_compress_hook: torch.bfloat16,
    default_hooks.fp16_compress_hook: torch.float16,
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: torch.float16,
}
"""The dtype in which the gradients are sent that a hook averages; ``None``: in their own."""


def accept_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Lets the module's ``register_comm_hook`` take the hooks that are known, and refuse others."""
    registration = _Registration(weakref.ref(ddp))
    ddp.register_comm_hook = registration.register  # type: ignore[method-assign]
    ddp._register_builtin_comm_hook = registration.register_builtin  # type: ignore[method-assign]
    set_sent_as(ddp, None)


def set_sent_as(ddp: DistributedDataParallel, dtype: torch.dtype | None) -> None:
    """Says in which dtype the module's gradients are sent; ``None``: in their own."""
    ddp._ddp_fusion_sent_as = dtype  # type: ignore[assignment]


def sent_as(ddp: DistributedDataParallel) -> torch.dtype | None:
    """See :func:`set_sent_as`. An attribute of the module, so that Dynamo, which traces this,
    compiles anew when it changes."""
    dtype: torch.dtype | None = ddp._ddp_fusion_sent_as  # type: ignore[assignment]
    return dtype


class _Registration:
    """What takes the place of a module's methods that register a hook."""

    def __init__(self, ddp: weakref.ref[DistributedDataParallel]) -> None:
        self._ddp = ddp
        self._is_done = False

    def register(self, state: object, hook: Hook) -> None:
        """``DistributedDataParallel.register_comm_hook`` under the flag.

        Args:
            state: ``None`` for the default process group, or the module's process group.
            hook: one of those of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``
                that average gradients.

        Raises:
            ValueError: another hook, or a group that is not the module's.
            RuntimeError: a hook is registered already, as in DDP.
        """
        ddp = self._ddp()
        assert ddp is not None, "a method is called on its module"
        self._check_known(hook)
        group = dist.group.WORLD if state is None else state
        if group is not ddp.process_group:
            given = "None, which stands for the default process group," if state is None else state
            raise ValueError(
                f"register_comm_hook(state={given}) of a DistributedDataParallel that was "
                "constructed while torch._inductor.config.ddp_fusion is set must be given the "
                "module's own process group as its state. Pass ddp.process_group."
            )
        self._accept(ddp, hook)

    def register_builtin(self, comm_hook_type: object) -> None:
        """``DistributedDataParallel._register_builtin_comm_hook`` under the flag."""
        ddp = self._ddp()
        assert ddp is not None, "a method is called on its module"
        self._check_known(comm_hook_type)
        self._accept(ddp, comm_hook_type)

    def _check_known(self, hook: object) -> None:
        try:
            is_known = hook in _SENT_AS
        except TypeError:  # Not hashable.
            is_known = False
        if not is_known:
            names = "allreduce_hook, bf16_compress_hook and fp16_compress_hook"
            raise ValueError(
                f"register_comm_hook(hook={getattr(hook, '__qualname__', hook)}) is not supported "
                "for a DistributedDataParallel that was constructed while "
                "torch._inductor.config.ddp_fusion is set, which takes "
                f"{names} of torch.distributed.algorithms.ddp_comm_hooks.default_hooks. Register "
                "one of these, or set ddp_fusion = None before this module is constructed."
            )

    def _accept(self, ddp: DistributedDataParallel, hook: object) -> None:
        if self._is_done:
            raise RuntimeError("register_comm_hook can only be called once.")
        self._is_done = True
        set_sent_as(ddp, _SENT_AS[hook])
