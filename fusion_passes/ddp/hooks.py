"""The gradient hook of DDP's Python reducer, as it is traced under the flag."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fusion_passes.collectives import all_reduce
from fusion_passes.ddp.comm_hooks import sent_as
from fusion_passes.ddp.disagreement import agree_on_eager
from fusion_passes.ddp.modules import ManagedModule, registry
from fusion_passes.ddp.sync import EXPECTED, LOCAL, tell_local
from fusion_passes.report.telling import tell_once
from fusion_passes.torch_private import after_backward, assume_constant_result, backward_id


@dataclass
class TracedHooks:
    """Which gradients' reductions were traced into a graph since the last look.

    Attributes:
        untraced_is_told: whether the user knows why those of the backward that runs are not.
    """

    untraced_is_told: bool = False
    _names: dict[str, None] = field(default_factory=dict)

    def note(self, name: str) -> None:
        self._names[name] = None

    def take(self) -> tuple[str, ...]:
        names = tuple(self._names)
        self._names.clear()
        return names


traced_hooks: Final = TracedHooks()


@dataclass
class _EagerReductions:
    """What eager hooks have reduced in the backward that runs, by module."""

    _backward: int = -1
    _numbers: dict[str, list[int]] = field(default_factory=dict)

    def note(self, module: str, number: int) -> None:
        """Lets the ranks compare what they have reduced when the backward ends."""
        backward = backward_id()
        if backward != self._backward:
            self._backward, self._numbers = backward, {}
            after_backward(functools.partial(agree_on_eager, self._numbers))
        self._numbers.setdefault(module, []).append(number)


_eager_reductions: Final = _EagerReductions()


def replace_hooks(ddp: DistributedDataParallel, module: ManagedModule) -> None:
    """Puts the package's hook where DDP's Python reducer has registered its own.

    It does the same, over the module's own group names, and says so when it runs eagerly.
    """
    group_name_while_tracing = assume_constant_result(_note_traced)
    for handle in ddp._accum_grad_hooks:
        handle.remove()
    ddp._accum_grad_hooks.clear()
    for index, parameter in enumerate(ddp._module_parameters):
        if parameter.requires_grad:
            hook = functools.partial(
                _reduce_gradient,
                # Parameters outlive DDP modules: a hook that held its module would keep it, and
                # go on reducing, after the user has dropped it.
                ddp=weakref.ref(ddp),
                name=module.name_for(index),
                module=module.group_name,
                number=index,
                world_size=module.world_size,
                group_name_while_tracing=group_name_while_tracing,
                local_while_tracing=assume_constant_result(tell_local),
            )
            handle = parameter.register_post_accumulate_grad_hook(hook)
            ddp._accum_grad_hooks.append(handle)
            _placed[handle.id] = weakref.ref(parameter)
            weakref.finalize(ddp, _remove, handle).atexit = False


_placed: Final[dict[int, weakref.ref[nn.Parameter]]] = {}
"""The parameter of each hook of the package, by the hook's handle."""


def _remove(handle: RemovableHandle) -> None:
    handle.remove()
    _placed.pop(handle.id, None)


def put_hooks_last() -> None:
    """Lets the hooks that others have put on the same parameters run first. What they see is the
    gradient of this rank alone, as with DDP's own reducer, which averages behind all hooks."""
    for number, reference in _placed.items():
        parameter = reference()
        hooks: Any = parameter._post_accumulate_grad_hooks if parameter is not None else None
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
    world_size: int,
    group_name_while_tracing: Callable[[str], str],
    local_while_tracing: Callable[[str], str],
) -> None:
    """Averages ``parameter.grad`` over the ranks, in place.

    Dividing first and then summing is what DDP does, so that a sum of large fp16 gradients does
    not overflow.
    """
    owner = ddp()
    if owner is None or parameter.grad is None:
        return
    if not getattr(owner, EXPECTED):
        if owner.require_backward_grad_sync and not getattr(owner, LOCAL):
            local_while_tracing(name)
        return
    if torch.compiler.is_compiling():
        name = group_name_while_tracing(name)
    else:
        _eager_reductions.note(module, number)
        if not traced_hooks.untraced_is_told:
            _tell_eager(name)
    dtype = sent_as(owner)
    gradient = parameter.grad if dtype is None else parameter.grad.to(dtype)
    parameter.grad.copy_(all_reduce(gradient / world_size, "sum", name))


def _tell_eager(name: str) -> None:
    owner = registry.owner_of(name)
    label = owner.module if owner else name
    tell_once(
        f"eager hook of {label}",
        f"The gradients of {label} are reduced one by one, each with a blocking collective: its "
        "backward did not run as a compiled graph, or broke out of it. ddp_fusion needs "
        "loss.backward() while torch._inductor.config.ddp_fusion is set, without "
        "create_graph=True, torch.compiler.disable or stance 'force_eager' around it; "
        "TORCH_LOGS=graph_breaks shows where a graph breaks.",
    )
