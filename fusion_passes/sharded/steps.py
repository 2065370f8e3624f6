"""Sends parameters from their owners to all ranks after each step of an optimizer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.backward import note_of_other_rank
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reducer.warnings import warn_once
from fusion_passes.sharded.modules import refuse, refuse_after_failed_step, sharded
from fusion_passes.sharded.reduction import ReduceToOwners
from fusion_passes.torch_private.process_groups import begin_broadcasts, begin_exchange

_ALONE_BYTES: Final = 2**16
"""Least size of a parameter that is sent as it lies. Smaller ones of one owner are sent together,
which copies them, and needs fewer collectives."""


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


stepped: Final = weakref.WeakSet[Optimizer]()
"""The optimizers that have stepped parameters with owners: each rank has a part of their state."""

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
    del args, kwargs
    for reducer, communication, numbers in () if IS_ALONE.get() else held_by(optimizer):
        refuse_after_failed_step(reducer, communication)
        kinds = (kind.__name__ for kind in type(optimizer).__mro__)
        why = next((_REFUSED[kind] for kind in kinds if kind in _REFUSED), "")
        local = communication.has_local(numbers)
        if local and not why:
            why = (
                f"{type(optimizer).__name__}.step is called while gradients of "
                f"{reducer.parameters.named(local)} are those of this rank alone. Average them "
                "first, by a backward outside of no_sync"
            )
        if why:
            refuse(reducer, f"{why}, or set shard_optimizer = False.")
        stepped.add(optimizer)
        communication.held.update(numbers)
        for number in communication.elsewhere.intersection(numbers):
            optimizer.state.pop(reducer.parameters.all[number], None)  # Adagrad makes it early.
        before = [communication.stepped_by.setdefault(n, id(optimizer)) for n in numbers]
        if set(before) != {id(optimizer)}:
            twice = [n for n, by in zip(numbers, before, strict=True) if by != id(optimizer)]
            warn_once(
                f"stepped twice {reducer.queue.name}",
                f"Two optimizers step {reducer.parameters.named(twice)} of {reducer.queue.name} "
                "between two averages. With FusionConfig.shard_optimizer = True, each of them "
                "keeps a state, and sends these parameters to all ranks. Give each parameter to "
                "one optimizer.",
            )
        communication.step = _frame_of_step()


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
    del args, kwargs
    for reducer, communication, numbers in () if IS_ALONE.get() else held_by(optimizer):
        try:
            send(reducer, communication, numbers)
        except Exception as error:
            said = note_of_other_rank([reducer], error)
            reducer.failures.leave(reducer.steps, f"{type(error).__name__}: {error}")
            if said is None:
                raise
            raise said from error
        communication.step = None


def broadcast(group: Any, tensors: Sequence[tuple[int, Tensor]], backend: str) -> None:
    """Broadcast tensors in place, each from a rank, and wait for that."""
    rank, ranks = group.rank(), range(group.size())
    if backend == "nccl" and tensors:
        begin_broadcasts(group, tensors, tensors[0][1].device)()
        return
    mine = [tensor for owner, tensor in tensors if owner == rank]
    received = [(owner, tensor) for owner, tensor in tensors if owner != rank]
    sent = [(other, tensor) for tensor in mine for other in ranks if other != rank]
    begin_exchange(group, sent, received)()


def send(
    reducer: Reducer, communication: ReduceToOwners, numbers: Sequence[ParameterNumber]
) -> None:
    """Send parameters from their owners to all ranks, and wait for that. Ranks cannot know which
    parameters a step has changed, so all are sent."""
    rank, kinds = reducer.module.group.rank(), reducer.parameters.kinds
    packs: dict[tuple[int, int, torch.dtype, torch.device], list[Tensor]] = {}
    others = []
    for number in numbers:
        parameter, owner = reducer.parameters.all[number].detach(), kinds[number].owner
        if owner != rank:
            others.append(reducer.parameters.all[number])
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        # Strides may differ between ranks, sizes cannot.
        alone = number if real.nbytes >= _ALONE_BYTES else -1
        packs.setdefault((alone, owner, real.dtype, real.device), []).append(real)
    sent, copied = list[tuple[int, Tensor]](), list[tuple[list[Tensor], Sequence[Tensor]]]()
    for (alone, owner, dtype, device), tensors in packs.items():
        sizes = [tensor.numel() for tensor in tensors]
        if alone >= 0 and tensors[0].is_contiguous():
            sent.append((owner, tensors[0]))
        elif sum(sizes):
            if owner == rank:
                pack = torch.cat([tensor.reshape(-1) for tensor in tensors])
            else:
                pack = torch.empty(sum(sizes), dtype=dtype, device=device)
                copied.append((tensors, pack.split(sizes)))
            sent.append((owner, pack))
    broadcast(reducer.module.group, sent, communication.backend)
    for tensors, parts in copied:
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)
    if others:  # As the step of an optimizer, which autograd sees.
        torch.autograd.graph.increment_version(others)
