"""Puts a DDP module under the flag's management, takes it out again, and lets a copy of one be
managed too.

What DDP's Python reducer lacks is found in two places: in the constructor's arguments (see
:mod:`fusion_passes.ddp.own_reducer`), and in methods that are called later. The latter are those of
:class:`ManagedDDP`, for each managed module by itself: it stays managed when the flag is unset.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.aot_backward import aot_backwards
from fusion_passes.ddp.buffers import prepare_buffers
from fusion_passes.ddp.comm_hooks import (
    accept_comm_hook,
    check_comm_hook,
    give_comm_hooks,
    is_known,
    note_comm_hook,
    sent_as,
    set_hooked,
    set_sent_as,
    why_not_on_buckets,
)
from fusion_passes.ddp.exiting import pause_at_exit
from fusion_passes.ddp.forward import ManagedForward
from fusion_passes.ddp.hook_buckets import HookCaller
from fusion_passes.ddp.hooks import remove_hooks, replace_hooks
from fusion_passes.ddp.joining import get_buffers, reduce_zeros
from fusion_passes.ddp.logging_data import run_time_fields
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.own_reducer import warn_own_reducer
from fusion_passes.ddp.rounds import watch
from fusion_passes.ddp.tensor_parallel import make_dtensors_when_read
from fusion_passes.flag import active_config
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import begin_no_graph, clear_backward_cache
from fusion_passes.torch_private.ddp import (
    HOOKS_OF_REDUCER,
    USES_PYTHON_REDUCER,
    comm_hooks,
    ddp_logging_data,
    give_own_reducer,
    register_buffer_comm_hook,
    set_static_graph,
    update_process_group,
)
from fusion_passes.torch_private.stand_ins import HookedGroup


class ManagedDDP(ManagedForward):
    """Takes DDP's place among the bases of a managed module's class."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average as a known hook would, or call the hook with the module's buckets; hand the
        module over to DDP's own reducer where that cannot be right."""
        group = dist.group.WORLD if state is None else state
        if is_known(hook) and group is self.process_group:
            accept_comm_hook(self, hook, state)
            aot_backwards.left_to_compiled_autograd.add(self)
            return
        self._check_comm_hook(hook)
        check_comm_hook(self)
        because = why_not_on_buckets(self, hook)
        if because:
            hand_over(self, because)
            DistributedDataParallel.register_comm_hook(self, state, hook)
            return
        note_comm_hook(self, hook, state)
        set_hooked(self, True)
        name = registry.module_of(self).group_name
        usage = participants[name].usage
        if usage is not None:
            usage.sends_all = True
        caller = HookCaller(name, weakref.ref(self), hook, state)
        registry.set_hooked(self, functools.partial(HookedGroup, launch=caller.launch))
        clear_backward_cache()
        aot_backwards.left_to_compiled_autograd.add(self)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        accept_comm_hook(self, comm_hook_type)
        aot_backwards.left_to_compiled_autograd.add(self)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        hand_over(self, "a hook of yours synchronises its buffers")
        register_buffer_comm_hook(self, *args, **kwargs)

    def _check_and_sync_module_buffers(self) -> None:
        get_buffers(self)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        reduce_zeros(self)

    def _match_unused_params_allreduce(self) -> None:
        """Nothing is left to do: what was used travels with the gradients."""

    def _update_process_group(self, new_process_group: Any) -> None:
        update_process_group(self, new_process_group)
        if registry.move(self):
            # The number of ranks is a constant of the graphs.
            replace_hooks(self, registry.module_of(self))
            clear_backward_cache()

    def _set_static_graph(self) -> None:
        """As DDP, where this promise replaces ``find_unused_parameters``."""
        set_static_graph(self)
        participants[registry.module_of(self).group_name].usage = None

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """DDP's, with what its reducer would have counted."""
        return ddp_logging_data(self) | run_time_fields(self)

    def __reduce_ex__(self, _: object) -> Any:
        """A copy of a managed module is managed too."""
        return _blank, (_users_class(self),), _portable(self.__getstate__())


_REPLACED: Final = tuple(
    name
    for kind in (ManagedForward, ManagedDDP)
    for name, value in vars(kind).items()
    if callable(value)
)
"""The methods that a managed module has from :class:`ManagedDDP`."""

_OVERRIDDEN: Final = tuple(name for name in _REPLACED if hasattr(DistributedDataParallel, name))
"""Those that DDP has too."""


def manage(ddp: DistributedDataParallel) -> None:
    """From now on, reduces the gradients of a module that uses the Python reducer."""
    make_dtensors_when_read(ddp.module)
    module = registry.add(ddp)
    meeting_of(module.group_name)  # Now, since later the store's host may be what has failed.
    if module.backend == "gloo":
        pause_at_exit()
    replace_hooks(ddp, module)
    set_sent_as(ddp, None)
    set_hooked(ddp, False)
    watch(ddp)
    prepare_buffers(ddp, module.group_name)
    _attach(ddp)


def hand_over(ddp: DistributedDataParallel, reason: str) -> None:
    """From now on, lets DDP's own reducer train a managed module.

    Args:
        ddp: the module; all ranks of its group must hand it over between the same two steps.
        reason: for the user.
    """
    _detach(ddp)
    remove_hooks(ddp)
    registry.discard(ddp)
    clear_backward_cache()
    give_own_reducer(ddp)
    give_comm_hooks(ddp)
    warn_own_reducer(ddp, reason)


# --- Methods -------------------------------------------------------------------------------------


def _attach(ddp: DistributedDataParallel) -> None:
    """Give a module the methods of :class:`ManagedDDP`.

    Where the user's class has some of them too, these must come first and reach ours by ``super``:
    the module's class becomes one with ours between the user's and DDP's. Otherwise they are
    attributes of the module, whose class stays what it is: programs compare ``type(model)``.
    """
    kind = type(ddp)
    ddps = DistributedDataParallel
    if any(getattr(kind, name) is not getattr(ddps, name) for name in _OVERRIDDEN):
        ddp.__class__ = _with_managed_methods(kind)
    else:
        ref = weakref.ref(ddp)
        ddp.__dict__ |= {name: _bound(ref, getattr(ManagedDDP, name)) for name in _REPLACED}


def _detach(ddp: DistributedDataParallel) -> None:
    ddp.__class__ = _users_class(ddp)
    for name in _REPLACED:
        ddp.__dict__.pop(name, None)


def _bound(
    ref: weakref.ref[DistributedDataParallel], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that does not keep its module."""

    @begin_no_graph
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        ddp = ref()
        assert ddp is not None, "a method is called on its module"
        return function(ddp, *args, **kwargs)

    return method


_classes: Final = process_state.keep(
    weakref.WeakValueDictionary[type[DistributedDataParallel], type[DistributedDataParallel]](),
    "classes with the methods of ManagedDDP, by the user's class",
    Lifetime.MODULE,
    reset=weakref.WeakValueDictionary.clear,
)


def _with_managed_methods(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    """A class like the user's, whose base is :class:`ManagedDDP` wherever it was DDP: one for all
    modules of that class, or each would be compiled for itself."""
    managed = _classes.get(kind)
    if managed is None:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        names["_ddp_fusion_users_class"] = kind
        managed = _classes[kind] = type(kind.__name__, (kind, ManagedDDP), names)
    return managed


def _users_class(ddp: DistributedDataParallel) -> type[DistributedDataParallel]:
    return getattr(type(ddp), "_ddp_fusion_users_class", type(ddp))


# --- Copies --------------------------------------------------------------------------------------


def _portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A managed module's attributes without what belongs to this one alone."""
    portable = {name: value for name, value in state.items() if name not in _REPLACED}
    portable[HOOKS_OF_REDUCER] = []
    return portable


def _blank(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
    """An object that becomes a copy of a managed module when it is given its state."""
    ddp = kind.__new__(kind)
    ddp.__dict__["__setstate__"] = _Restoring(ddp)
    return ddp


class _Restoring:
    """What ``__setstate__`` of such an object does. Where the flag is not set, it becomes a module
    with DDP's own reducer."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def __call__(self, state: dict[str, Any]) -> None:
        ddp = self._ddp
        del ddp.__dict__["__setstate__"]
        is_managed = active_config() is not None
        state = state | {USES_PYTHON_REDUCER: is_managed}
        type(ddp).__setstate__(ddp, state)
        if is_managed:
            dtype = sent_as(ddp)
            manage(ddp)
            set_sent_as(ddp, dtype)
            if dtype is None:  # As in DDP, a copy has no hook, and may be given one.
                comm_hooks(ddp).clear()
