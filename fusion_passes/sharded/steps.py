"""Sends parameters from their owners to all ranks after each step of an optimizer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reducer.warnings import warn_once
from fusion_passes.sharded.modules import note_thread, refuse, refuse_after_failed_step, sharded
from fusion_passes.sharded.reduction import ReduceToOwners
from fusion_passes.sharded.sends import on_the_way


def held_by(optimizer: Any) -> list[tuple[Reducer, ReduceToOwners, list[ParameterNumber]]]:
    """The modules with owners of which an optimizer holds parameters, and the numbers of these."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for reducer, communication in sharded():
        parameters = reducer.parameters.all
        numbers = [n for n in reducer.parameters.numbers if id(parameters[n]) in ids]
        if numbers:
            found.append((reducer, communication, numbers))
    return found


stepped: Final = weakref.WeakKeyDictionary[Optimizer, dict[int, int]]()
"""The optimizers that have stepped parameters with owners, of which each rank has a part of the
state. For each, the owners of its parameters when it stepped them first, by id."""

IS_ALONE: Final = ContextVar(
    "whether steps of optimizers are those of this rank alone", default=False
)


def hook_steps() -> list[Any]:
    """Have all optimizers call this file before and after each step; return the handles."""
    return [
        register_optimizer_step_pre_hook(_before_step),
        register_optimizer_step_post_hook(_after_step),
    ]


@torch.compiler.disable
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse a step that would not be DDP's."""
    for reducer, communication, numbers in () if IS_ALONE.get() else held_by(optimizer):
        refuse_after_failed_step(reducer, communication)
        on_the_way.wait(reducer.parameters.all[number] for number in numbers)
        kinds = (kind.__name__ for kind in type(optimizer).__mro__)
        why = next((_REFUSED[kind] for kind in kinds if kind in _REFUSED), "")
        if why:
            refuse(reducer, f"{why}, or set shard_optimizer = False.")
        if not _has_closure(args, kwargs):
            _refuse_local(optimizer, reducer, communication, numbers)
        _refuse_moved(optimizer, reducer, numbers)
        communication.held.update(numbers)
        for number in communication.elsewhere.intersection(numbers):
            optimizer.state.pop(reducer.parameters.all[number], None)  # Adagrad makes it early.
        before = [communication.stepped_by.setdefault(n, id(optimizer)) for n in numbers]
        if set(before) != {id(optimizer)}:
            twice = [n for n, by in zip(numbers, before, strict=True) if by != id(optimizer)]
            warn_once(
                f"stepped twice {reducer.queue.name}",
                f"Two optimizers step {reducer.parameters.named(twice)} of {reducer.queue.name} "
                "between two averages. With FusionConfig.shard_optimizer, each of them "
                "keeps a state, and sends these parameters to all ranks. Give each parameter to "
                "one optimizer.",
            )
        note_thread(communication)
        communication.step = _frame_of_step()


def _refuse_moved(optimizer: Any, reducer: Reducer, numbers: Sequence[ParameterNumber]) -> None:
    """Refuse to step parameters whose state another rank has, since they belong to a new module."""
    owners, kinds = stepped.setdefault(optimizer, {}), reducer.parameters.kinds
    owner_of = {
        n: owners.setdefault(id(reducer.parameters.all[n]), kinds[n].owner) for n in numbers
    }
    moved = [number for number, owner in owner_of.items() if owner != kinds[number].owner]
    if moved and optimizer.state:
        refuse(
            reducer,
            f"{type(optimizer).__name__} has the state of {reducer.parameters.named(moved)} on the "
            "ranks that owned them in an earlier DistributedDataParallel module, and others own "
            "them now. Call fusion_passes.full_optimizer_state_dict(optimizer) before that module "
            "is freed, and load its result when the new one is constructed.",
        )


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step was given a closure, whose backward may average gradients."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _refuse_local(
    optimizer: Any,
    reducer: Reducer,
    communication: ReduceToOwners,
    numbers: Sequence[ParameterNumber],
) -> None:
    local = communication.has_local(numbers)
    if local:
        refuse(
            reducer,
            f"{type(optimizer).__name__}.step is called while gradients of "
            f"{reducer.parameters.named(local)} are those of this rank alone. Average them "
            "first, by a backward outside of no_sync, or set shard_optimizer = False.",
        )


def _frame_of_step() -> FrameType | None:
    """The frame of torch's function that calls the hooks of a step, and then the step."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != Optimizer.__module__:
        frame = frame.f_back
    return frame


_REFUSED: Final = MappingProxyType(
    {
        "LBFGS": "LBFGS needs the gradients of all parameters at once, and a rank has those of its "
        "own parameters. Use another optimizer",
        "ZeroRedundancyOptimizer": "ZeroRedundancyOptimizer divides the parameters by the ranks "
        "itself. Use the optimizer that it wraps",
    }
)
"""Why optimizers of torch are refused, by the name of their class, with the remedy."""


@torch.compiler.disable
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Send the parameters that the step may have changed. With ``"overlap"``, the next forward
    waits for them."""
    for reducer, communication, numbers in () if IS_ALONE.get() else held_by(optimizer):
        if _has_closure(args, kwargs):
            _refuse_local(optimizer, reducer, communication, numbers)
        on_the_way.begin(reducer, communication, numbers)
        if reducer.module.config.shard_optimizer is True:
            on_the_way.wait(reducer.parameters.all[number] for number in numbers)
        communication.step = None
