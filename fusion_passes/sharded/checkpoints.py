"""Saves and loads the state of optimizers, of which each rank has that of its own parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.sharded.sends import broadcast, on_the_way
from fusion_passes.sharded.steps import IS_ALONE, held_by, stepped
from fusion_passes.torch_private import tree_leaves, tree_map_only
from fusion_passes.torch_private.process_groups import backend_name

PART: Final = "ddp_fusion_part"
"""Key of the state of an optimizer whose parameters have owners: the rank, the number of ranks, and
the indices of the parameters whose state the rank keeps."""

StateDict: TypeAlias = dict[str, Any]


_IS_WHOLE: Final = ContextVar("whether states of optimizers are saved of all ranks", default=False)


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor that is sent: its shape, strides and dtype, and whether it lies on the
    host."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


def full_optimizer_state_dict(optimizer: Any, *, rank0_only: bool = False) -> StateDict:
    """Return the state of an optimizer as plain DDP would have it in ``optimizer.state_dict()``. It
    can be loaded with ``optimizer.load_state_dict`` on any number of ranks, with
    ``FusionConfig.shard_optimizer`` or without.

    All ranks must call this: it is a collective.

    Args:
        optimizer: an optimizer of ``torch.optim``.
        rank0_only: whether only the first rank of each module's process group gets the whole
            state, so that the others need no memory for it.

    Raises:
        ValueError: the modules whose parameters it has stepped are gone.
    """
    if optimizer in stepped and not held_by(optimizer):
        raise ValueError(
            f"The state of {type(optimizer).__name__} is divided by the ranks of a "
            "DistributedDataParallel module that was freed. Call full_optimizer_state_dict before."
        )
    state_dict: StateDict = optimizer.state_dict()
    state_dict.pop(PART, None)
    indices, state = _indices(optimizer), dict(state_dict["state"])
    for reducer, _, numbers in held_by(optimizer):
        is_kept = not rank0_only or reducer.module.group.rank() == 0
        _gather(reducer, numbers, indices, state, is_kept=is_kept)
    # In plain DDP's order: parameters by index, other keys last.
    keys = sorted(state, key=lambda key: key if isinstance(key, int) else len(indices))
    state_dict["state"] = {key: state[key] for key in keys}
    return state_dict


def _indices(optimizer: Any) -> dict[int, int]:
    """The index of each parameter in the optimizer's state, by the parameter's id."""
    parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    found: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        found.setdefault(id(parameter), index)
    return found


def _gather(
    reducer: Reducer,
    numbers: list[ParameterNumber],
    indices: dict[int, int],
    state: dict[Any, Any],
    *,
    is_kept: bool,
) -> None:
    """Add the state of a module's parameters that other ranks have, if ``is_kept``."""
    group, kinds = reducer.module.group, reducer.parameters.kinds
    index_of = {number: indices[id(reducer.parameters.all[number])] for number in numbers}
    mine = {
        number: tree_map_only(Tensor, _shape, state[index])
        for number, index in index_of.items()
        if kinds[number].owner == group.rank() and index in state
    }
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    for owner, shapes in enumerate(every):
        for number, shape in shapes.items():
            index, device = index_of[number], kinds[number].device
            if owner == group.rank():
                for tensor in tree_leaves(state[index]):
                    if isinstance(tensor, Tensor):
                        _broadcast(group, tensor.to(device).contiguous(), owner)
                continue
            receive = functools.partial(_receive, group, owner, device)
            received = tree_map_only(_Shape, receive, shape)
            if is_kept:
                state[index] = received


def _shape(tensor: Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type == "cpu")


def _receive(group: Any, owner: int, device: torch.device, shape: _Shape) -> Tensor:
    sent = torch.empty(shape.shape, dtype=shape.dtype, device=device)
    _broadcast(group, sent, owner)
    result = torch.empty_strided(shape.shape, shape.strides, dtype=shape.dtype, device=device)
    result.copy_(sent)
    return result.cpu() if shape.is_on_host else result


def _broadcast(group: Any, tensor: Tensor, owner: int) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    broadcast(group, [(owner, real)], backend_name(group, tensor.device))


# --- Loading -------------------------------------------------------------------------------------


def _elsewhere(optimizer: Any) -> set[int]:
    """The ids of the parameters of an optimizer that other ranks own."""
    return {
        id(reducer.parameters.all[number])
        for reducer, communication, numbers in held_by(optimizer)
        for number in communication.elsewhere.intersection(numbers)
    }


def state_dict(original: Callable[[Any], StateDict], optimizer: Any) -> StateDict:
    """Take the place of ``Optimizer.state_dict``: mark the state as that of one rank."""
    if _IS_WHOLE.get():
        return cast("StateDict", _while(_IS_WHOLE, False, full_optimizer_state_dict, optimizer))
    state, elsewhere = original(optimizer), _elsewhere(optimizer)
    if elsewhere:
        group = held_by(optimizer)[0][0].module.group
        kept = [index for key, index in _indices(optimizer).items() if key not in elsewhere]
        state[PART] = {"rank": group.rank(), "ranks": group.size(), "parameters": kept}
    return state


def load_state_dict(
    original: Callable[[Any, StateDict], None], optimizer: Any, state_dict: StateDict
) -> None:
    """Take the place of ``Optimizer.load_state_dict``: keep the state of parameters that this rank
    owns.

    Raises:
        ValueError: the state is that of another rank.
    """
    elsewhere, indices, part = _elsewhere(optimizer), _indices(optimizer), state_dict.get(PART)
    dropped = {index for key, index in indices.items() if key in elsewhere}
    if part is not None and not set(indices.values()) <= dropped.union(part["parameters"]):
        raise ValueError(
            f"The state of {type(optimizer).__name__} is that of rank {part['rank']} of "
            f"{part['ranks']} ranks with FusionConfig.shard_optimizer, and lacks parameters "
            "that this rank steps. Save fusion_passes.full_optimizer_state_dict(optimizer), which "
            "all ranks call, and load that."
        )
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    keys = [key for group in saved for key in group["params"]]
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    if len(keys) == len(ids):  # Else torch refuses it.
        left_out = {key for key, each in zip(keys, ids, strict=True) if each in elsewhere}
        state = {k: v for k, v in state_dict["state"].items() if k not in left_out}
        state_dict = {**state_dict, "state": state}
    original(optimizer, state_dict)
    stepped.pop(optimizer, None)  # The state is that of the present owners.
    for _, communication, _ in held_by(optimizer):
        communication.step = None  # A step that has failed is of no importance any more.


# --- torch.distributed.checkpoint.state_dict ------------------------------------------------------


def init_state(original: Callable[[Any], None], optimizer: Any) -> None:
    """Take the place of ``_init_optim_state``, which makes the state of an optimizer by a step with
    gradients of zero: only of parameters that this rank owns, and without a collective, since an
    optimizer that has a state takes no step."""
    on_the_way.wait()
    elsewhere = _elsewhere(optimizer)
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
    try:
        _while(IS_ALONE, True, original, optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def get_state(original: Callable[..., Any], model: Any, optimizers: Any, info: Any) -> Any:
    """Take the place of ``_get_optim_state_dict``: with ``full_state_dict=True``, it is that of all
    ranks."""
    is_whole = info.full_state_dict and info.handle_optim
    return _while(_IS_WHOLE, is_whole, original, model, optimizers, info)


def _while(
    variable: ContextVar[bool], value: bool, function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function while a variable has a value."""
    token = variable.set(value)
    try:
        return function(*args)
    finally:
        variable.reset(token)


def load_state(
    original: Callable[..., None], model: Any, optimizers: Any, state: Any, info: Any
) -> None:
    """Take the place of ``_load_optim_state_dict``, which fits a ``full_state_dict`` into the state
    of the rank: ``load_state_dict`` does that here."""
    if info.handle_optim and info.full_state_dict and any(map(held_by, optimizers)):
        if info.broadcast_from_rank0:
            sent = [state]
            dist.broadcast_object_list(sent, src=0)
            (state,) = sent
        info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
    original(model, optimizers, state, info)


def split_state(
    original: Callable[..., Any], model: Any, optimizer: Any, state: Any, info: Any
) -> Any:
    """Take the place of ``_split_optim_state_dict``, which refuses a state that lacks parameters:
    those of other ranks may be missing."""
    elsewhere = _elsewhere(optimizer)
    missing: StateDict = {
        name: {}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in elsewhere
        for name in info.fqn_param_mapping[parameter]
        if name not in state["state"]
    }
    if any(isinstance(key, str) for key in state["state"]):
        state = {**state, "state": {**state["state"], **missing}}
    return original(model, optimizer, state, info)
