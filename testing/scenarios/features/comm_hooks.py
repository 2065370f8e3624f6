"""DDP's communication hooks: hooks that only average, hooks that the reducer calls with each
bucket, DDP's hook on buffers, and its hook that steps an optimizer."""

# No annotations from the future: DDP compares the annotations of communication hooks with types.
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from testing.scenarios.run import Run

Registering = Callable[[Run, Any], None]
"""Registers a hook with a DDP module."""


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook under another name: eager DDP refuses the name of the bf16 hook without NCCL."""

    def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return hook(state, bucket)

    return users_hook


class Calls:
    """The calls of a user's hook: in each backward, for the buckets from the first to the last."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, bucket: dist.GradBucket) -> None:
        """Check and count a call."""
        assert bucket.index() == self._next
        self._next = 0 if bucket.is_last() else self._next + 1
        shapes = [parameter.shape for parameter in bucket.parameters()]
        assert shapes == [gradient.shape for gradient in bucket.gradients()]


def summing(state: Calls, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that sums twice: it neither averages nor works in place."""
    state.add(bucket)
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    doubled: torch.futures.Future[Tensor] = work.get_future().then(
        lambda future: 2 * future.value()[0]
    )
    return doubled


def summing_over(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that sums instead of averaging, over the group that its state, a list, holds at the
    time."""
    work: Any = dist.all_reduce(bucket.buffer(), group=state[0], async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def alone() -> Any:
    """A process group of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def power_sgd_state() -> powerSGD_hook.PowerSGDState:
    """State of PowerSGD, which compresses from the third step on."""
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )


def _post_local_state() -> post_localSGD_hook.PostLocalSGDState:
    """State of post-local SGD: from the third step on, each rank averages with itself."""
    return post_localSGD_hook.PostLocalSGDState(None, alone(), 2)


def _of(hook: Callable[..., Any], state_of: Callable[[], Any] = lambda: None) -> Registering:
    return lambda _, ddp: ddp.register_comm_hook(state_of(), hook)


def _in_bf16(run: Run, ddp: Any) -> None:
    hook = default_hooks.bf16_compress_hook
    ddp.register_comm_hook(None, hook if run.is_fused else renamed(hook))


def _sum_buffers(group: Any, buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)


HOOKS: Final[Mapping[str, Registering]] = {
    # Hooks that only average.
    "allreduce": _of(default_hooks.allreduce_hook),
    "fp16": _of(default_hooks.fp16_compress_hook),
    "bf16": _in_bf16,
    "wrapped in fp16": _of(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "builtin": lambda _, ddp: ddp._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "noop": _of(debugging_hooks.noop_hook),  # Gradients stay local.
    # Hooks that are called with buckets.
    "summing": _of(summing, Calls),
    "wrapped in bf16": _of(
        renamed(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))
    ),
    "power sgd": _of(powerSGD_hook.powerSGD_hook, power_sgd_state),
    "power sgd in fp16": _of(
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd_state
    ),
    "post-local sgd": _of(post_localSGD_hook.post_localSGD_hook, _post_local_state),
    "another group": _of(default_hooks.allreduce_hook, alone),
    # Hooks that DDP's own reducer must know about.
    "on buffers": lambda _, ddp: ddp._register_buffer_comm_hook(ddp.process_group, _sum_buffers),
    "stepping": lambda _, ddp: ddp._register_fused_optim(torch.optim.SGD, lr=1.0),
}
