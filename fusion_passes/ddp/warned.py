"""Warnings of gradients that no reducer averages, though they look as if one would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusion_passes.reducer.backward import reducers
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state

_SHOWN: Final = 4
"""Names that a warning has."""


def warn_stays_local(label: str) -> None:
    """Warn that gradients of a module were not averaged, though nothing asked for that."""
    warn_once(
        f"local gradients of {label}",
        f"The gradients of a backward of {label} stay on their rank, as with eager DDP: its "
        "forward has had its backward before, or did not run through the DDP module. Call the "
        "module anew before each backward that is to be averaged.",
    )


_looked_at: Final = process_state.keep(
    WeakTensorKeyDictionary(),
    "parameters of which it is known whose they are, and the version of the reducers then",
    Lifetime.PROCESS,
    reset=WeakTensorKeyDictionary.clear,
)


def warn_not_reduced(unmanaged: Iterable[Tensor]) -> None:
    """Warn of parameters of managed modules whose gradients DDP does not know of.

    Args:
        unmanaged: tensors that a backward reaches, and no reducer has.
    """
    parameters = [leaf for leaf in unmanaged if isinstance(leaf, nn.Parameter)]
    new = {id(leaf) for leaf in parameters if _looked_at.get(leaf) != reducers.version}
    if not new:
        return
    _looked_at.update((leaf, reducers.version) for leaf in parameters)
    for reducer in reducers.alive():
        ddp = reducer.ddp
        if ddp is None:
            continue
        named = ddp.module.named_parameters()
        found = [name for name, parameter in named if id(parameter) in new]
        names = [repr(name) for name in found if name not in ddp.parameters_to_ignore]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warn_once(
                f"not reduced {reducer.label}",
                f"Gradients of {reducer.label} ({len(names)}: {', '.join(names[:_SHOWN])}{more}) "
                "stay on their rank, as with eager DDP: DistributedDataParallel was constructed "
                "before these parameters were made, or required a gradient. Construct it after the "
                "last change of the model.",
            )
