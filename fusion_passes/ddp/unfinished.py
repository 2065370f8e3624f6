"""The error of a forward whose module cannot train any further."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private.ddp import parameters_of, raise_as_ddp

UNFINISHED: Final = "_ddp_fusion_unfinished"
"""Attribute of a managed module: the error of the next forward, if a backward has left parameters
without a gradient; else ``None``."""

FORGOTTEN: Final = (
    "This DistributedDataParallel module was constructed before fusion_passes was reset, which has "
    "forgotten it, and with it how its gradients are reduced. Construct it anew."
)


def unfinished(ddp: DistributedDataParallel, missing: Iterable[int]) -> str:
    """Return the error of the next forward, as near to that of DDP's own reducer as can be."""
    module = registry.module_of(ddp)
    numbers = sorted(missing)
    names = ", ".join(module.parameters[number] for number in numbers)
    swapped = [
        module.parameters[number]
        for number in numbers
        if not any(parameters_of(ddp)[number] is p for p in ddp.module.parameters())
    ]
    remedy = (
        f" {', '.join(swapped)} of the model is another parameter than when {module.label} was "
        "constructed: construct DistributedDataParallel after the last change of the model."
        if swapped
        else " Let every parameter take part in the loss, freeze it before DistributedDataParallel "
        "is constructed, or give DistributedDataParallel find_unused_parameters=True."
    )
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"This error indicates that {module.label} has parameters that were not used in producing "
        f"loss.{remedy}\nParameters which did not receive grad for rank "
        f"{ddp.process_group.rank()}: {names}\nParameter indices which did not receive grad for "
        f"rank {ddp.process_group.rank()}: {' '.join(map(str, numbers))}"
    )


def refuse_unfinished(ddp: DistributedDataParallel) -> None:
    """Raise the error that the last backward has left for this forward.

    Raises:
        RuntimeError: as DDP's own reducer raises.
    """
    raise_as_ddp(ddp, RuntimeError, getattr(ddp, UNFINISHED))
