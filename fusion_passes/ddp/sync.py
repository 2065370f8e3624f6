"""Which backwards are averaged: those that eager DDP averages.

There, a forward decides. One outside of ``no_sync`` makes DDP expect a gradient of each parameter,
and the next backward that gives it is averaged, wherever it runs. What comes after that, such as a
second backward through the same forward, stays on its rank. DDP's Python reducer asks instead where
the backward runs.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement import runs_of
from fusion_passes.ddp.disagreement import parameters_in
from fusion_passes.ddp.modules import registry
from fusion_passes.report.telling import tell_once

EXPECTED: Final = "_ddp_fusion_expected"
"""Attribute of a managed module: whether the next gradients are averaged."""

LOCAL: Final = "_ddp_fusion_local"
"""Attribute: whether the last forward ran under ``no_sync``."""

_parameters_in = functools.cache(parameters_in)


def note_forward(ddp: Any, *_: Any) -> None:
    """A forward hook. It stores constants and reads nothing of these, so that a traced forward
    needs no guard on them."""
    if torch.is_grad_enabled():
        if ddp.require_backward_grad_sync:
            setattr(ddp, EXPECTED, True)
            setattr(ddp, LOCAL, False)
        else:
            setattr(ddp, LOCAL, True)


class ReducerOfManaged:
    """Stands for the C++ reducer of a managed module, which does nothing.

    ``torch.distributed.pipelining`` runs all forwards under ``no_sync``, and tells the reducer
    before the backward that is to be averaged.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._reducer: Any = ddp.reducer

    def prepare_for_backward(self, outputs: Any) -> None:
        self._reducer.prepare_for_backward(outputs)
        setattr(self._ddp(), EXPECTED, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


@dataclass
class _Progress:
    """How far the gradients that a module expects have come.

    Attributes:
        runs: how often it has reduced, at the last look.
        missing: numbers of parameters without a gradient yet.
    """

    missing: set[int]
    runs: dict[str, int] = field(default_factory=dict)


_progress: Final[weakref.WeakKeyDictionary[DistributedDataParallel, _Progress]] = (
    weakref.WeakKeyDictionary()
)


def watch(ddp: DistributedDataParallel) -> None:
    """From now on, decides for a module which of its backwards are averaged."""
    _progress[ddp] = _Progress(_expected_of(ddp))
    ddp.__dict__ |= {EXPECTED: False, LOCAL: False, "reducer": ReducerOfManaged(ddp)}


def note_backward() -> None:
    """After a backward: modules that have got all their gradients expect no more."""
    for ddp, progress in _progress.items():
        if not registry.holds(ddp):
            continue
        runs = runs_of(registry.module_of(ddp).group_name)
        for where, (calls, collectives) in runs.items():
            if progress.runs.get(where) != calls and collectives is not None:
                progress.runs[where] = calls
                progress.missing -= _parameters_in(collectives)
        if not progress.missing:
            progress.missing = _expected_of(ddp)
            setattr(ddp, EXPECTED, False)


def tell_local(name: str) -> str:
    """Says that gradients were not averaged, though nothing asked for that.

    Args:
        name: the group name of one of their reductions.
    """
    owner = registry.owner_of(name)
    label = owner.module if owner else name
    tell_once(
        f"local gradients of {label}",
        f"The gradients of a backward of {label} stay on their rank, as with eager DDP: its "
        "forward has had its backward before, or did not run through the DDP module. Call the "
        "module anew before each backward that is to be averaged.",
    )
    return name


def _expected_of(ddp: DistributedDataParallel) -> set[int]:
    return {n for n, parameter in enumerate(ddp._module_parameters) if parameter.requires_grad}
