"""The errors that a reducer raises, in DDP's words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeAlias

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.parameters import Parameters


class RefusedGradientError(RuntimeError):
    """This rank received a gradient that DDP does not allow. DDP's reducer raises a
    RuntimeError."""


Refuse: TypeAlias = Callable[[str], NoReturn]
"""Raises :class:`RefusedGradientError` with this text."""


def repeated_gradients(
    parameters: Parameters, label: str, numbers: Collection[ParameterNumber]
) -> str:
    """Gradients arrived a second time in one iteration."""
    return (
        f"Expected to mark a variable ready only once. Since the last forward of {label}, "
        f"gradients of {parameters.named(numbers)} have come twice, and those of others not yet. "
        "Let every parameter take part in the first backward, freeze it before "
        "DistributedDataParallel is constructed, or give DistributedDataParallel "
        "find_unused_parameters=True."
    )


def changed_graph(
    parameters: Parameters, label: str, number: ParameterNumber, count: int, times: int
) -> str:
    """A gradient of a static graph was accumulated ``count`` times, and ``times`` in the first
    iteration."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with "
        f"static_graph set to True: {label} has used {parameters.names[number]} {count} times now, "
        f"and {times} in its first iteration. Construct DistributedDataParallel without "
        "static_graph=True."
    )


def late_hook(name: str, label: str) -> str:
    """A hook was registered after a graph had marked the gradient ready, and before autograd had
    accumulated it: the hook would not change what is sent."""
    return (
        f"A hook was registered on {name} of {label} while the backward that gives its gradient "
        "ran, after that was stored in its bucket: the hook would not change what is sent. "
        "Register it before the backward."
    )


def misplaced(name: str, label: str) -> str:
    """The error of a gradient in the place of another one."""
    return (
        f"The gradient of {name} of {label} lies in its bucket, in the place of another gradient, "
        "so both are wrong. If code of yours did not set it there, please report this, and set "
        "ddp_fusion = None before the module is constructed."
    )


def wrong_layout(name: str, label: str, layout: object) -> str:
    """A gradient is not strided, and DDP did not expect it to be sparse."""
    return (
        f"{name} of {label} has a gradient of layout {layout}, which DDP reduces for "
        "nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True) only, as they were when it was "
        "constructed."
    )


def second_backward(label: str) -> str:
    """A second backward reaches outputs of a forward with ``find_unused_parameters=True``."""
    return (
        f"A second backward reaches outputs of one forward of {label}, which was constructed with "
        "find_unused_parameters=True: the first backward has reduced all gradients, those that "
        "were still to come as unused. Call one backward of the sum of the losses, call the first "
        "one with retain_graph=True if gradients of the second one are to stay on their rank, or "
        "leave find_unused_parameters out: an iteration may have several backwards then."
    )


def unfinished(
    ddp: Any, parameters: Parameters, label: str, rank: int, missing: Sequence[ParameterNumber]
) -> str:
    """The last backward left parameters without a gradient."""
    names = parameters.names
    kept = {id(parameter) for parameter in ddp.module.parameters()}
    swapped = [names[n] for n in missing if id(parameters.all[n]) not in kept]
    remedy = (
        f" {', '.join(swapped)} of the model is another parameter than when {label} was "
        "constructed: construct DistributedDataParallel after the last change of the model."
        if swapped
        else " Let every parameter take part in the loss, freeze it before "
        "DistributedDataParallel is constructed, or give DistributedDataParallel "
        "find_unused_parameters=True."
    )
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"This error indicates that {label} has parameters that were not used in producing loss."
        f"{remedy}\nParameters which did not receive grad for rank {rank}: "
        f"{', '.join(names[n] for n in missing)}\nParameter indices which did not receive grad "
        f"for rank {rank}: {' '.join(map(str, missing))}"
    )
