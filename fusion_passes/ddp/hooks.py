"""The gradient hook of DDP's Python reducer, as it is traced under the flag."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusion_passes.ddp.comm_hooks import is_hooked, sent_as
from fusion_passes.ddp.expecting import EXPECTED, LOCAL
from fusion_passes.ddp.kept import note_arrived
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.outside import note_outside
from fusion_passes.ddp.rounds import is_announced, note_eager
from fusion_passes.ddp.unfused import warn_local
from fusion_passes.graph.collectives import all_reduce
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import assume_constant_result, disable_dynamo
from fusion_passes.torch_private.autograd import (
    after_backward,
    backward_id,
)
from fusion_passes.torch_private.ddp import hooks_of_reducer, parameters_of


class _Names(threading.local):
    """Of this thread: another traces other backwards."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}


@dataclass
class TracedHooks:
    """Which gradients' reductions were traced into a graph since the last look.

    Attributes:
        untraced_is_warned: whether the user knows why those of the backward that runs are not.
        is_reentrant: whether a backward runs inside of another, as in reentrant checkpointing.
    """

    untraced_is_warned: bool = False
    is_reentrant: bool = False
    _traced: _Names = field(default_factory=_Names)
    _eager: set[tuple[int, bool, str]] = field(default_factory=set)

    def note(self, name: str) -> None:
        self._traced.names[name] = None

    @contextlib.contextmanager
    def reentrant(self) -> Iterator[None]:
        """Around a backward that runs inside of another."""
        outer, self.is_reentrant = self.is_reentrant, True
        try:
            yield
        finally:
            self.is_reentrant = outer

    @contextlib.contextmanager
    def untraced(self, is_warned: bool = True) -> Iterator[None]:
        """Around a backward whose gradients' reductions are not traced.

        Args:
            is_warned: whether the user knows why.
        """
        outer, self.untraced_is_warned = self.untraced_is_warned, is_warned
        try:
            yield
        finally:
            self.untraced_is_warned = outer

    def warn_at_the_end(self, name: str) -> None:
        """Warn that a gradient's hook has run eagerly, if its backward comes to its end."""
        module = (backward_id(), self.is_reentrant, _label_of(name))
        if module not in self._eager:
            self._eager = {other for other in self._eager if other[0] == module[0]} | {module}
            after_backward(functools.partial(_warn_eager, *module[1:]))

    def take(self) -> tuple[str, ...]:
        names = tuple(self._traced.names)
        self._traced.names.clear()
        return names

    def reset(self) -> None:
        vars(self).update(vars(TracedHooks()))


traced_hooks: Final = process_state.keep(
    TracedHooks(), "what a backward has traced", Lifetime.CALL, reset=TracedHooks.reset
)


def replace_hooks(ddp: DistributedDataParallel, module: ManagedModule) -> None:
    """Put the package's hook where DDP's Python reducer has registered its own.

    It does the same, over the module's own group names. Where it runs eagerly, the gradient is
    reduced when the backward has ended.
    """
    group_name_while_tracing = assume_constant_result(_note_traced)
    remove_hooks(ddp)
    for index, parameter in enumerate(parameters_of(ddp)):
        if parameter.requires_grad:
            hook = functools.partial(
                _reduce_gradient,
                # Parameters outlive DDP modules: a hook that held its module would keep it, and
                # go on reducing, after the user has dropped it.
                ddp=weakref.ref(ddp),
                name=module.name_for(index),
                module=module.group_name,
                number=index,
                world_size=None if index in module.sparse else module.world_size,
                group_name_while_tracing=group_name_while_tracing,
                local_while_tracing=assume_constant_result(warn_local),
            )
            handle = parameter.register_post_accumulate_grad_hook(hook)
            hooks_of_reducer(ddp).append(handle)
            _placed[handle.id] = handle.hooks_dict_ref
            weakref.finalize(ddp, _remove, handle).atexit = False


_placed: Final = process_state.keep(
    dict[int, weakref.ref[dict[int, Any]]](),
    "among which hooks of a parameter each hook of the package is, by the hook's handle",
    Lifetime.MODULE,
    reset=dict.clear,
)


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Remove the hooks that DDP's Python reducer or the package has registered."""
    for handle in hooks_of_reducer(ddp):
        _remove(handle)
    hooks_of_reducer(ddp).clear()


def _remove(handle: RemovableHandle) -> None:
    handle.remove()
    _placed.pop(handle.id, None)


def put_hooks_last() -> None:
    """Let the hooks that others have put on the same parameters run first. What they see is the
    gradient of this rank alone, as with DDP's own reducer, which averages after all hooks."""
    for number, reference in _placed.copy().items():  # A module may be freed meanwhile.
        hooks = reference()
        if hooks and len(hooks) > 1 and number in hooks and next(reversed(hooks)) != number:
            hooks[number] = hooks.pop(number)


def _note_traced(name: str) -> str:
    """Called by Dynamo while it traces; what it returns becomes a constant of the graph."""
    traced_hooks.note(name)
    return name


def _reduce_gradient(
    parameter: nn.Parameter,
    *,
    ddp: weakref.ref[DistributedDataParallel],
    name: str,
    module: str,
    number: int,
    world_size: int | None,
    group_name_while_tracing: Callable[[str], str],
    local_while_tracing: Callable[[str], str],
) -> None:
    """Average ``parameter.grad`` over the ranks, in place; when the backward has ended, if this
    is not traced, and no graph that runs untraced does it.

    Dividing first and then summing is what DDP does, so that a sum of large fp16 gradients does
    not overflow.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    if not is_traced and is_announced(module, number):
        note_arrived(module, number)
        return
    owner = ddp()
    if owner is None or parameter.grad is None:
        return
    if not getattr(owner, EXPECTED):
        if owner.require_backward_grad_sync and not getattr(owner, LOCAL):
            local_while_tracing(name)
        return
    if world_size is None:  # What is sparse is divided later.
        _note_sparse(module, number)
        return
    if not is_traced:
        note_arrived(module, number)
        note_eager(module, number)
        note_outside(module, number)
        if not traced_hooks.untraced_is_warned:
            traced_hooks.warn_at_the_end(name)
        return
    name = group_name_while_tracing(name)
    if is_hooked(owner):  # Which divides, if that is what it wants.
        parameter.grad.copy_(all_reduce(parameter.grad, "sum", name))
        return
    dtype = sent_as(owner)
    gradient = parameter.grad if dtype is None else parameter.grad.to(dtype)
    parameter.grad.copy_(all_reduce(gradient / world_size, "sum", name))


@disable_dynamo
def _note_sparse(module: str, number: int) -> None:
    """Have a sparse gradient averaged when the backward has ended: no graph can."""
    note_eager(module, number)


def _label_of(name: str) -> str:
    owner = registry.owner_of(name)
    return owner.module if owner else name


def _warn_eager(is_reentrant: bool, label: str) -> None:
    what = f"Gradients of {label} are reduced after their backward, with no compute beside them: "
    if is_reentrant:
        warn_once(
            f"reentrant {label}",
            what + "they come from reentrant activation checkpointing, whose backward runs inside "
            "of another one and is not traced. Give torch.utils.checkpoint.checkpoint "
            "use_reentrant=False.",
        )
        return
    warn_once(
        f"eager hook of {label}",
        what + "it did not run as a compiled graph, or broke out of it. ddp_fusion needs "
        "loss.backward() while torch._inductor.config.ddp_fusion is set, without "
        "create_graph=True, torch.compiler.disable or stance 'force_eager' around it; "
        "TORCH_LOGS=graph_breaks shows where a graph breaks.",
    )
