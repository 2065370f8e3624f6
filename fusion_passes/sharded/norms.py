"""Norms of gradients, and infinities among them, over all ranks: each rank has the gradients of the
parameters that it owns."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.sharded.modules import sharded
from fusion_passes.sharded.steps import held_by
from fusion_passes.torch_private.process_groups import all_gather, begin_all_reduce

Norm: TypeAlias = Callable[..., Tensor]
"""torch's function that computes a norm, called with tensors, type, error_if_nonfinite, foreach."""


@dataclass
class _Asked(threading.local):
    """What ``clip_grad_norm_`` has asked for last, in each thread.

    Attributes:
        answer: the tensor that it was given, with the norm of this rank's gradients; ``None`` once
            that has been corrected.
        correct: returns the norm over all ranks of process groups, which it is given with the
            parameters.
    """

    answer: Tensor | None = None
    correct: functools.partial[Tensor] | None = None


_asked: Final = _Asked()
"""The norm that ``clip_grad_norm_`` is about to clip by."""


def norm_for_clipping(
    original: Norm,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Take the place of the function that ``clip_grad_norm_`` calls with the gradients that exist.
    They may all be on other ranks, so :func:`clip_with_norm`, which is called next, with the
    parameters, has the ranks exchange their norms."""
    gradients = _listed(tensors)
    _asked.correct = functools.partial(
        _norm, original, gradients, norm_type, error_if_nonfinite, foreach
    )
    _asked.answer = original(gradients, norm_type, False, foreach)
    return _asked.answer


def clip_with_norm(
    original: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Take the place of the function that scales gradients: correct the norm first, if it is that
    of :func:`norm_for_clipping`."""
    parameters = _listed(parameters)
    if _asked.correct is not None and _asked.answer is total_norm:
        correct, _asked.correct, _asked.answer = _asked.correct, None, None
        ids = set(map(id, parameters))
        groups = dict.fromkeys(
            reducer.module.group
            for reducer, _ in sharded()
            if any(id(parameter) in ids for parameter in reducer.parameters.trained)
        )
        total_norm.data = correct(list(groups), parameters)  # clip_grad_norm_ returns this tensor.
    original(parameters, max_norm, total_norm, foreach)


def by_device_and_dtype(
    original: Callable[..., dict[Any, Any]], lists: list[list[Tensor]], *args: Any
) -> dict[Any, Any]:
    """Take the place of the function that groups gradients for ``clip_grad_value_``, which does not
    expect that there are none: a rank may own no parameter."""
    return original(lists, *args) if lists[0] else {}


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def total_norm(
    original: Norm,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Take the place of ``torch.nn.utils.get_total_norm``, which is called with gradients alone, on
    a rank that has none with an empty list.

    Raises:
        ValueError: this rank cannot know which ranks take part.
    """
    gradients = _listed(tensors)
    ids = set(map(id, gradients))
    groups = dict.fromkeys(
        reducer.module.group
        for reducer, _ in sharded()
        if not ids or any(id(p.grad) in ids for p in reducer.parameters.trained)
    )
    if not ids and len(groups) > 1:
        raise ValueError(
            "get_total_norm is called without a tensor, while modules with "
            "FusionConfig.shard_optimizer are on several process groups: nobody can tell "
            "which of these take part. Call clip_grad_norm_ with the parameters instead."
        )
    return _norm(original, gradients, norm_type, error_if_nonfinite, foreach, list(groups), ())


def _norm(
    compute: Norm,
    gradients: Sequence[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    groups: Sequence[Any],
    parameters: Sequence[Tensor],
) -> Tensor:
    """The norm of the gradients of all ranks of these groups, each counted once: a gradient that
    no rank alone has is on all ranks. Its dtype is that of the norm of the parameters, if they are
    given, since ranks may own gradients of other dtypes."""
    norm_type = float(norm_type)
    if not groups:
        return compute(gradients, norm_type, error_if_nonfinite, foreach)
    if not norm_type > 0:
        raise ValueError(
            f"norm_type = {norm_type} cannot be computed with FusionConfig.shard_optimizer: "
            "it must be greater than 0, or inf. Choose another norm."
        )
    left, norms = {id(gradient): gradient for gradient in gradients}, list[Tensor]()
    for group in groups:
        mine = [
            left.pop(id(parameter.grad))
            for reducer, _ in sharded()
            if reducer.module.group is group
            for parameter in reducer.parameters.trained
            if id(parameter.grad) in left
        ]
        norm = compute(mine, norm_type, False, foreach)
        device = _device_of(group)
        norms.append(all_gather(group, norm.detach().to(device, torch.float64).view(1)))
    if left:
        norms.append(compute(list(left.values()), norm_type, False, foreach).double().view(1))
    every = torch.cat([norm.to(norms[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(every, norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        # In torch's words, which raises this on all ranks then.
        compute([total], norm_type, True, foreach)
    like = [p for p in parameters if p.requires_grad] or gradients
    dtypes = [tensor.dtype.to_real() for tensor in like] or [torch.float32]
    device = like[0].device if like else torch.device("cpu")
    return total.to(device, functools.reduce(torch.promote_types, dtypes))


def _device_of(group: Any) -> torch.device:
    """The device on which a group's collectives run on this rank: that of a module's parameters."""
    owner = next(reducer for reducer, _ in sharded() if reducer.module.group is group)
    return next(iter(owner.parameters.kinds.values())).device


def unscale(
    original: Callable[..., dict[torch.device, Tensor]], scaler: Any, optimizer: Any, *args: Any
) -> dict[torch.device, Tensor]:
    """Take the place of ``GradScaler._unscale_grads_``, which unscales the gradients of this rank
    and returns whether there is an infinite one, by device: have all ranks skip the same steps."""
    found = original(scaler, optimizer, *args)
    groups = dict.fromkeys(reducer.module.group for reducer, _, _ in held_by(optimizer))
    for group in groups:
        device = _device_of(group)
        number = found.setdefault(device, torch.zeros((), device=device))
        for other in found.values():
            number.copy_(torch.maximum(number, other.to(device)))
        begin_all_reduce(group, number, dist.ReduceOp.MAX)()
    return found
