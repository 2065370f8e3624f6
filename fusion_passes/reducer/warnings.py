"""Warnings for the user; each is given once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Final

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer

MOST_NAMES: Final = 4
"""Maximum number of parameters that a warning names."""


class FusionWarning(UserWarning):
    """The package does not do something that ``ddp_fusion`` was set for. The message gives the
    reason and the remedy."""


_warned: Final = dict[str, str]()
"""The warnings that the user has been given, by topic."""


def warnings_so_far() -> tuple[str, ...]:
    """The messages of all warnings that this process has given, in order, each once."""
    return tuple(dict.fromkeys(_warned.values()))


def warn_once(topic: str, text: str) -> None:
    """Warn, unless this process has already given a warning on ``topic``."""
    if topic not in _warned:
        _warned[topic] = text
        warnings.warn(text, FusionWarning, stacklevel=_users_level())


def _users_level() -> int:
    """The ``stacklevel`` of the innermost frame that belongs neither to this package nor to
    torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in ("fusion_passes", "torch"):
        frame, level = frame.f_back, level + 1
    return level


# --- Gradients that are not averaged --------------------------------------------------------------


def named(parameters: Sequence[str], of: str = "") -> str:
    """Number and names of parameters: ``6: a, b, c, d and 2 more``."""
    more = len(parameters) - MOST_NAMES
    names = ", ".join(parameters[:MOST_NAMES])
    return f"{len(parameters)}{of}: {names}" + (f" and {more} more" if more > 0 else "")


def warn_stays_local(reducer: Reducer) -> None:
    """Warn that gradients of a module were not averaged, although the user did not ask for that."""
    # Where Dynamo has traced the forward, this cannot tell the second backward that eager DDP
    # refuses with find_unused_parameters=True.
    alike = "eager DDP, if that raises no error" if reducer.used.is_found else "eager DDP"
    warn_once(
        f"local gradients of {reducer.queue.name}",
        f"Gradients of a backward of {reducer.queue.name} are not all-reduced, as with {alike}: "
        "its forward ran under no_sync, already had a backward, or did not go through the "
        "DistributedDataParallel module. Call that module before each backward whose gradients are "
        "to be averaged.",
    )


def warn_rounded(reducer: Reducer) -> None:
    """Warn that gradients of a module are rounded to the dtype of their bucket: the dtype that
    gradients had when the module was constructed."""
    names = [repr(reducer.parameters.names[number]) for number in sorted(reducer.memory.rounded)]
    warn_once(
        f"rounded {reducer.queue.name}",
        f"Gradients of {reducer.queue.name} ({named(names)}) are rounded before they are averaged: "
        "they have a wider dtype than their buckets, whose dtypes were fixed when "
        "DistributedDataParallel was constructed. Convert the module, or set grad_dtype, before "
        "you construct it.",
    )


_looked_at: Final = WeakTensorKeyDictionary()
"""Parameters whose owner was looked up, and the version of the reducers at that time."""


def warn_not_reduced(unmanaged: Iterable[Tensor]) -> None:
    """Warn about parameters of managed modules that DDP did not have when it was constructed.
    ``unmanaged`` are the leaf tensors that a backward reaches and that belong to no reducer."""
    parameters = [leaf for leaf in unmanaged if isinstance(leaf, nn.Parameter)]
    new = {id(leaf) for leaf in parameters if _looked_at.get(leaf) != reducers.version}
    if not new:
        return
    _looked_at.update((leaf, reducers.version) for leaf in parameters)
    for reducer in reducers.alive():
        ddp = reducer.module.ddp
        if ddp is None:
            continue
        names = [
            repr(name)
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) in new and name not in ddp.parameters_to_ignore
        ]
        if names:
            warn_once(
                f"not reduced {reducer.queue.name}",
                f"Gradients of {reducer.queue.name} ({named(names)}) "
                "are not all-reduced, as with eager DDP: DistributedDataParallel was constructed "
                "before these parameters were created or required a gradient. Construct it after "
                "the last change to the model.",
            )
