"""The error of a forward whose module cannot train any further."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NoReturn

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.reducer.reducer import FORGOTTEN, UNFINISHED, RefusedGradientError
from fusion_passes.torch_private.ddp import parameters_of, raise_as_ddp

__all__ = ["FORGOTTEN", "UNFINISHED", "RefusedGradientError"]

NOT_ENDED: Final = (
    "Expected to have finished reduction in the prior iteration before starting a new one. The "
    "last backward of this module has failed on this rank, or still runs, and the other ranks "
    "cannot know: torch._inductor.config.ddp_fusion was unset after the module was constructed. "
    "Construct DistributedDataParallel anew on all ranks."
)


def unfinished(ddp: DistributedDataParallel, module: ManagedModule, missing: Iterable[int]) -> str:
    """Return the error of the next forward, as near to that of DDP's own reducer as can be."""
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


def refuse_changed(
    ddp: DistributedDataParallel, module: ManagedModule, new: Iterable[int]
) -> NoReturn:
    """Raise the error of a static graph that uses parameters which it has not used before.

    Raises:
        RefusedGradientError: always; the next forward raises an error with the same text.
    """
    names = ", ".join(module.parameters[number] for number in sorted(new))
    error = (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with "
        f"static_graph set to True: {module.label} has used {names} now, and not in its first "
        "iteration. Construct DistributedDataParallel without static_graph=True."
    )
    setattr(ddp, UNFINISHED, error)
    raise_as_ddp(ddp, RefusedGradientError, error)


def refuse_repeated(
    ddp: DistributedDataParallel, module: ManagedModule, repeated: Iterable[int]
) -> NoReturn:
    """Raise the error of a second gradient where the first backward has left others without one.

    Raises:
        RefusedGradientError: always.
    """
    names = ", ".join(module.parameters[number] for number in sorted(repeated))
    raise_as_ddp(
        ddp,
        RefusedGradientError,
        "Expected to mark a variable ready only once. Two backwards since the last forward of "
        f"{module.label} have given gradients of {names}, and the first has not given those of all "
        "its parameters. Let every parameter take part in the first, freeze it before "
        "DistributedDataParallel is constructed, or give DistributedDataParallel "
        "find_unused_parameters=True.",
    )


def leave_error(ddp: DistributedDataParallel | None, error: str | None) -> None:
    """Leave the next forward of a module, if it is still there, an error, or none."""
    if ddp is not None and getattr(ddp, UNFINISHED) != error:
        setattr(ddp, UNFINISHED, error)
