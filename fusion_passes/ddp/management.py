"""Puts a DDP module under the flag's management, takes it out again, and sees to it that a copy of
one is managed too.

What DDP's Python reducer lacks is found in two places: in the constructor's arguments (see
:mod:`fusion_passes.ddp.own_reducer`), and in methods that are called later. The latter are replaced
on each managed module, not on the class: a module stays managed when the flag is unset.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.comm_hooks import accept_comm_hook, is_known, sent_as, set_sent_as
from fusion_passes.ddp.forward import prepare_forward
from fusion_passes.ddp.hooks import replace_hooks
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.own_reducer import tell_own_reducer
from fusion_passes.ddp.sync import watch
from fusion_passes.ddp.tensor_parallel import make_dtensors_when_read
from fusion_passes.flag import active_config
from fusion_passes.torch_private import clear_backward_cache

_HANDLES: Final = "_ddp_fusion_handles"
"""Attribute of a managed module: handles of its forward hooks that are ours."""

_HOOK_TABLES: Final = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")


def manage(ddp: DistributedDataParallel) -> None:
    """From now on, reduces the gradients of a module that uses the Python reducer."""
    make_dtensors_when_read(ddp.module)
    module = registry.add(ddp)
    replace_hooks(ddp, module)
    set_sent_as(ddp, None)
    watch(ddp)
    ddp.__dict__[_HANDLES] = prepare_forward(ddp, module)
    ddp.__dict__ |= _Methods(ddp).by_name()


def hand_over(ddp: DistributedDataParallel, reason: str) -> None:
    """From now on, lets DDP's own reducer train a managed module.

    Args:
        ddp: the module; all ranks of its group must hand it over between the same two steps.
        reason: for the user.
    """
    for name in (*_Methods.NAMES, _HANDLES):
        for handle in ddp.__dict__.pop(name) if name == _HANDLES else ():
            handle.remove()
        ddp.__dict__.pop(name, None)
    for handle in ddp._accum_grad_hooks:
        handle.remove()
    ddp._accum_grad_hooks.clear()
    registry.discard(ddp)
    clear_backward_cache()
    ddp._use_python_reducer = False
    parameters, is_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, is_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None, "it comes with the reducer"
        ddp.logger._set_static_graph()
    tell_own_reducer(ddp, reason)


class _Methods:
    """What takes the place of methods of a managed module."""

    NAMES: Final = (
        "forward",
        "register_comm_hook",
        "_register_builtin_comm_hook",
        "_register_buffer_comm_hook",
        "join",
        "join_hook",
        "_update_process_group",
        "__reduce_ex__",
    )

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ref = weakref.ref(ddp)
        self._joins = True

    def by_name(self) -> dict[str, Callable[..., Any]]:
        methods = {name: getattr(self, f"do_{name.strip('_')}") for name in self.NAMES[1:]}
        return methods | {"forward": _forward_of(self._ref)}

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ref()
        assert ddp is not None, "a method is called on its module"
        return ddp

    def do_register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        ddp = self._ddp
        group = dist.group.WORLD if state is None else state
        if is_known(hook) and group is ddp.process_group:
            accept_comm_hook(ddp, hook)
            return
        ddp._check_comm_hook(hook)
        name = hook.__qualname__
        hand_over(ddp, f"its communication hook {name} is not one that averages {_KNOWN}")
        ddp.register_comm_hook(state, hook)

    def do_register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        accept_comm_hook(self._ddp, comm_hook_type)

    def do_register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        ddp = self._ddp
        hand_over(ddp, "a hook of yours synchronises its buffers")
        ddp._register_buffer_comm_hook(*args, **kwargs)

    def do_join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        self._joins = enable
        try:
            join = type(self._ddp).join
            return join(self._ddp, divide_by_initial_world_size, enable, throw_on_early_termination)
        finally:
            self._joins = True

    def do_join_hook(self, **kwargs: Any) -> Any:
        ddp = self._ddp
        if self._joins:
            hand_over(ddp, "it joins ranks with uneven inputs")
        return type(ddp).join_hook(ddp, **kwargs)

    def do_update_process_group(self, new_process_group: Any) -> None:
        ddp = self._ddp
        type(ddp)._update_process_group(ddp, new_process_group)
        if registry.move(ddp):
            # The number of ranks is a constant of the graphs.
            replace_hooks(ddp, registry.module_of(ddp))
            clear_backward_cache()

    def do_reduce_ex(self, _: object) -> Any:
        ddp = self._ddp
        return _blank, (type(ddp),), _portable(ddp.__getstate__())


def _forward_of(ref: weakref.ref[DistributedDataParallel]) -> Callable[..., Any]:
    """What DDP's own ``forward`` comes to with the Python reducer. Dynamo traces this one: DDP's is
    in a file that it must skip for all other modules."""

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        ddp = ref()
        assert ddp is not None, "a method is called on its module"
        return ddp.module(*inputs, **kwargs)

    return forward


_KNOWN: Final = (
    "over the module's own group (allreduce_hook, bf16_compress_hook and fp16_compress_hook of "
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks do)"
)


# --- Copies --------------------------------------------------------------------------------------


def _portable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A managed module's attributes without what belongs to this one alone."""
    ours = {handle.id for handle in state[_HANDLES]}
    portable = {k: v for k, v in state.items() if k not in (*_Methods.NAMES, _HANDLES)}
    portable["_accum_grad_hooks"] = []
    for table in _HOOK_TABLES:
        entries = portable[table]
        portable[table] = type(entries)((k, v) for k, v in entries.items() if k not in ours)
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
        state = state | {"_use_python_reducer": is_managed}
        type(ddp).__setstate__(ddp, state)
        if is_managed:
            dtype = sent_as(ddp)
            manage(ddp)
            set_sent_as(ddp, dtype)
