"""DDP features that the package's reducer does not implement. A module that uses one falls back to
DDP's own reducer with a warning, or is refused if the feature is not known to work with a compiled
forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.tensor_parallel import check_dtensors
from fusion_passes.reducer.hooks import refuse_optimizer
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.reducer.warnings import warn_once

own_reducers: Final = weakref.WeakSet[DistributedDataParallel]()
"""The modules that DDP's own reducer trains, though they were constructed under the flag."""


def check_supported(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments and parameters of DDP that neither reducer supports under the flag.

    Raises:
        ValueError: names the argument or parameter, and the remedy.
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


def refuse_if_sharded(ddp: DistributedDataParallel, what: str, remedy: str) -> None:
    """Refuse a feature that is not implemented beside the option ``shard_optimizer``.

    Raises:
        ValueError: the module has that option; it names the feature and the remedy.
    """
    reducer = reducer_of(ddp)
    if reducer.module.config.shard_optimizer:
        raise ValueError(
            f"FusionConfig.shard_optimizer of {reducer.module.label} cannot be combined "
            f"with {what}. {remedy}, or set shard_optimizer = False before the module is "
            "constructed."
        )


def warn_own_reducer(ddp: DistributedDataParallel, reason: str) -> None:
    """Warn that DDP's own reducer trains the module, and that its gradients are not fused."""
    own_reducers.add(ddp)
    warn_once(
        f"own reducer {type(ddp.module).__name__} {reason}",
        f"DistributedDataParallel({type(ddp.module).__name__}) is trained by DDP's own reducer, as "
        f"without ddp_fusion, and its gradients are not fused: {reason}.",
    )


def warn_without_effect(arguments: Mapping[str, Any]) -> None:
    """Warn of arguments that have no effect, because they tune the C++ reducer."""
    names = ("gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation")
    given = [name for name in names if arguments.get(name)]
    if given:
        warn_once(
            f"no effect {given}",
            f"DistributedDataParallel({', '.join(given)}) has no effect under ddp_fusion: "
            "it tunes the C++ reducer, which does not run. Leave it out.",
        )
