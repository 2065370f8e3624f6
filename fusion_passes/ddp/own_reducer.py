"""What DDP offers and a managed module would leave out without a word.

A module that uses it is trained by DDP's own reducer, as without the flag, and the user is warned;
or it is refused, where that cannot be known to work with a compiled forward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.tensor_parallel import check_dtensors
from fusion_passes.reducer.backward import refuse_optimizer
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import after_backward, hooks_on_gradient
from fusion_passes.torch_private.ddp import (
    delayed_gradients,
    delayed_hook,
)

own_reducers: Final = process_state.keep(
    weakref.WeakSet[DistributedDataParallel](),
    "the modules that DDP's own reducer trains, though they were constructed under the flag",
    Lifetime.MODULE,
    reset=weakref.WeakSet.clear,
)

_WITHOUT_EFFECT: Final = ("gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation")


def check_supported(arguments: Mapping[str, Any]) -> None:
    """Refuse what works with neither reducer under the flag.

    Args:
        arguments: what DDP is to be constructed with, by name; the wrapped ``module`` among them.

    Raises:
        ValueError: it names the argument and the remedy.
    """
    if arguments.get("mixed_precision"):
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) is not supported while "
            "torch._inductor.config.ddp_fusion is set: it exchanges the parameters' memory around "
            "the forward, which cannot be compiled. Use torch.autocast and "
            "FusionConfig(reduce_dtype=...), or set ddp_fusion = None before this module is "
            "constructed."
        )
    for name, parameter in arguments["module"].named_parameters():
        refuse_optimizer(name, parameter)
    check_dtensors(arguments["module"], arguments.get("device_mesh"))


def reason_for_own_reducer(arguments: Mapping[str, Any]) -> str | None:
    """Why a module is to be trained by DDP's own reducer, and what to do instead; ``None`` if it
    can be fused.

    Args:
        arguments: as for :func:`check_supported`.
    """
    if not arguments.get("delay_all_reduce_named_params"):
        return None
    return (
        "it was given delay_all_reduce_named_params=.... To fuse, leave it out: reductions overlap "
        "the backward anyway"
    )


def warn_own_reducer(ddp: DistributedDataParallel, reason: str) -> None:
    """Warn that the module is not fused."""
    own_reducers.add(ddp)
    warn_once(
        f"own reducer {type(ddp.module).__name__} {reason}",
        f"DistributedDataParallel({type(ddp.module).__name__}) is trained by DDP's own reducer, as "
        f"without ddp_fusion, and its gradients are not fused: {reason}.",
    )


def wait_for_delayed(ddp: DistributedDataParallel, hooked: nn.Parameter | None) -> None:
    """Have the backward of a module wait for the collective that reduces its delayed gradients.

    DDP launches that one from a hook and drops its handle: whoever reads the gradients next races
    with it (torch 2.11 to 2.15).

    Args:
        ddp: a module that DDP's own reducer trains.
        hooked: the parameter that the hook is on, if any reductions are delayed.
    """
    hooks = hooks_on_gradient(hooked) if hooked is not None else {}
    for number, hook in hooks.items():
        if hook == delayed_hook(ddp):
            hooks[number] = functools.partial(_reduce_delayed, weakref.ref(ddp))


def _reduce_delayed(ref: weakref.ref[DistributedDataParallel], gradient: Tensor) -> Tensor:
    ddp = ref()
    buffer = delayed_gradients(ddp) if ddp is not None else None
    if ddp is not None and buffer is not None:
        buffer.div_(dist.get_world_size(ddp.process_group))
        work = dist.all_reduce(buffer, group=ddp.process_group, async_op=True)
        after_backward(work.wait)
    return gradient


def warn_without_effect(arguments: Mapping[str, Any]) -> None:
    """Warn of arguments that have no effect, because they tune the C++ reducer."""
    given = [name for name in _WITHOUT_EFFECT if arguments.get(name)]
    if given:
        warn_once(
            f"no effect {given}",
            f"DistributedDataParallel({', '.join(given)}) has no effect under ddp_fusion: "
            "it tunes the C++ reducer, which does not run. Leave it out.",
        )
