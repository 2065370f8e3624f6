"""Managed DDP modules: a :class:`fusion_passes.reducer.reducer.Reducer` averages their gradients
in place of DDP's own reducer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import FusionConfig, active_config
from fusion_passes.ddp.attachment import (
    attach_reducer,
    detach_reducer,
    refuse_memory,
    settings_of,
    undo_attachment,
)
from fusion_passes.ddp.comm_hooks import (
    accept_comm_hook,
    call_comm_hook,
    check_comm_hook,
    reason_against_hook,
)
from fusion_passes.ddp.forward import (
    ManagedForward,
    broadcast_buffers,
    check_finished,
    sends_buffers,
)
from fusion_passes.ddp.own_reducer import refuse_if_sharded, warn_own_reducer
from fusion_passes.ddp.tensor_parallel import make_dtensors_when_read
from fusion_passes.reducer.averaged_module import STATE, State
from fusion_passes.reducer.backward import note_of_other_rank, reducers
from fusion_passes.reducer.communication import SENT_AS, AllReduce, name_of_hook
from fusion_passes.reducer.rank_errors import compare_settings, meet_ranks
from fusion_passes.reducer.reducer import REDUCER, Reducer, reducer_of
from fusion_passes.reducer.used_parameters import StaticGraph
from fusion_passes.torch_private.ddp import (
    USES_PYTHON_REDUCER,
    comm_hooks,
    common_rank,
    ddp_logging_data,
    divides_by_initial_size,
    give_own_reducer,
    register_buffer_comm_hook,
    register_with_reducer,
    set_static_graph,
    update_process_group,
)
from fusion_passes.torch_private.dynamo import begin_no_graph
from fusion_passes.torch_private.process_groups import backend_name


class ManagedDDP(ManagedForward):
    """The methods of a managed module that replace DDP's: see :func:`_give_methods`."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average as a known hook of :data:`SENT_AS` would. Call any other hook with the module's
        buckets, or have DDP's own reducer call it if :func:`reason_against_hook` says so."""
        group = dist.group.WORLD if state is None else state
        is_known = hook in tuple(SENT_AS)  # A tuple, because a hook may be unhashable.
        if is_known and group is self.process_group:
            accept_comm_hook(self, hook, state)
            return
        self._check_comm_hook(hook)
        check_comm_hook(self, hook)
        reason = reason_against_hook(self, name_of_hook(hook))
        if reason is not None:
            hand_over(self, reason)
            DistributedDataParallel.register_comm_hook(self, state, hook)
            return
        call_comm_hook(self, hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        accept_comm_hook(self, comm_hook_type)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        hand_over(self, "a hook of yours synchronises its buffers")
        register_buffer_comm_hook(self, *args, **kwargs)

    def _check_and_sync_module_buffers(self) -> None:
        check_finished(self)
        if sends_buffers(self):
            broadcast_buffers(self, common_rank(self, is_candidate=False))

    def _match_all_reduce_for_bwd_pass(self) -> None:
        reducer = reducer_of(self)
        communication = reducer.queue.communication
        if isinstance(communication, AllReduce) and not divides_by_initial_size(self):
            # Have the collective sum, as on the other ranks. Zeros need no division.
            communication.count_ranks = lambda: 1.0
        try:
            reducer.reduce_zeros()
        except Exception as error:
            said = note_of_other_rank([reducer], error)
            if said is None:
                raise
            raise said from error

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: :meth:`Reducer.reduce_zeros` has all-reduced the used-parameter map."""

    def _update_process_group(self, new_process_group: Any) -> None:
        refuse_if_sharded(
            self,
            "_update_process_group, since optimizer states would be on other ranks than parameters",
            "Construct a new module on the new group",
        )
        before, reducer = self.process_group, reducer_of(self)
        refuse_memory(reducer, new_process_group)
        try:
            update_process_group(self, new_process_group)
            attach_reducer(self, reducer.module.config, reducer.module.label)
        except BaseException:  # The module still has its previous reducer.
            update_process_group(self, before)
            raise

    def _set_static_graph(self) -> None:
        """Declare the graph static, which as in DDP replaces ``find_unused_parameters``."""
        set_static_graph(self)
        reducer = reducer_of(self)
        reducer.used = StaticGraph(reducer.parameters, reducer.module)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """DDP's logging data, with the fields that its C++ reducer would have filled."""
        return {**ddp_logging_data(self), **logging_data(reducer_of(self))}

    def __reduce_ex__(self, _: object) -> Any:
        """Reduce the module to a state without its reducer and :class:`ManagedDDP`'s methods: its
        copy gets its own of these from :func:`_restore`."""
        left_out = {*_REPLACED, REDUCER, STATE}
        state = {name: value for name, value in self.__getstate__().items() if name not in left_out}
        return _blank, (_users_class(self),), state


_REPLACED: Final = tuple(
    name
    for kind in (ManagedForward, ManagedDDP)
    for name, value in vars(kind).items()
    if callable(value)
)
"""Names of the methods that a managed module gets from :class:`ManagedDDP`."""

_OVERRIDDEN: Final = tuple(name for name in _REPLACED if hasattr(DistributedDataParallel, name))
"""Names of the methods in :data:`_REPLACED` that DDP defines too."""


class IdleCppReducer:
    """The ``reducer`` attribute of a managed module: forwards to DDP's C++ reducer, which is idle,
    and replaces the methods that would make that one average gradients or launch collectives.

    ``torch.distributed.pipelining`` runs all forwards under ``no_sync``, and calls
    ``prepare_for_backward`` before the backward that is to be averaged. ``join`` has ranks without
    inputs rebuild buckets, which is a collective that the other ranks would not launch. Programs
    that wrap a model again call ``DistributedDataParallel._remove_autograd_hooks`` first.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._reducer: Any = ddp.reducer

    def prepare_for_backward(self, outputs: Any) -> None:
        # Not forwarded: the C++ reducer would average the gradients a second time.
        del outputs
        reducer_of(self._ddp()).module.state = State.EXPECTED

    def _remove_autograd_hooks(self) -> None:
        ddp = self._ddp()
        assert ddp is not None, "it is asked to"
        detach_reducer(reducer_of(ddp))

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


# --- Management ----------------------------------------------------------------------------------


def manage_by_reducer(
    ddp: DistributedDataParallel,
    config: FusionConfig,
    *,
    is_copy: bool = False,
    is_in_step: bool = False,
) -> None:
    """Have a reducer of the package average the gradients of a module from now on. For a copy, no
    collective is launched, as with DDP, because one rank may make a copy alone. If this fails, no
    hook of the module stays on its parameters.

    Args:
        ddp: the module.
        config: options of the flag.
        is_copy: whether the module is a copy of a managed module.
        is_in_step: whether all ranks have just run a collective together.

    Raises:
        RanksDisagreeError: the settings of ranks differ, or a rank has not constructed the module.
        ValueError: the options cannot be satisfied.
    """
    # Copies are counted apart: a rank that makes one alone numbers its modules as the others do.
    kind, numbers = "DDP copy" if is_copy else "DDP", _count.setdefault(ddp.process_group, {})
    number = numbers.get(kind, -1) + 1
    label = f"{kind} {number} ({type(ddp.module).__name__})"
    try:
        make_dtensors_when_read(ddp.module)
        ddp.reducer = IdleCppReducer(ddp)  # type: ignore[assignment]
        attach_reducer(ddp, config, label)
        reducer = reducer_of(ddp)
        settings = {} if is_copy else settings_of(ddp, config)
        # A fake process group has no other ranks.
        if not is_copy and backend_name(ddp.process_group, ddp.device) != "fake":
            meet_ranks(ddp.process_group, label, number, is_in_step=is_in_step)
        numbers[kind] = number  # Either all ranks count this module, or none does.
        if not is_copy:
            compare_settings(ddp.process_group, label, settings, ddp.device)
        refuse_memory(reducer, ddp.process_group)
        if config.mode == "auto" and is_copy:
            reducer.record.decision = ("the buckets of a copy are filled up to caps",)
        elif config.mode == "auto":
            reducers.slices.learn_layout(reducer)
        _give_methods(ddp)
    except BaseException:
        undo_attachment(ddp)
        raise


_count: Final = weakref.WeakKeyDictionary[Any, dict[str, int]]()
"""The numbers of the last module and of the last copy on each process group; kept, since the
group's store knows them."""


def hand_over(ddp: DistributedDataParallel, reason: str) -> None:
    """Have DDP's own reducer train a managed module from now on, and warn with the reason. All
    ranks of its process group must do this between the same two steps."""
    refuse_if_sharded(ddp, f"DDP's own reducer, which would train it: {reason}", "Leave this out")
    ddp.__class__ = _users_class(ddp)
    for name in _REPLACED:
        ddp.__dict__.pop(name, None)
    detach_reducer(ddp.__dict__.pop(REDUCER))
    give_own_reducer(ddp)
    for hook, state in comm_hooks(ddp):
        register_with_reducer(ddp, hook, state)
    warn_own_reducer(ddp, reason)


def _give_methods(ddp: DistributedDataParallel) -> None:
    """Give a module the methods of :class:`ManagedDDP`.

    If the user's class overrides some of these methods, its overrides must run first and reach
    :class:`ManagedDDP`'s by ``super``: the module gets a class that has :class:`ManagedDDP` between
    the user's class and DDP. Otherwise the methods become attributes of the module, whose class
    does not change, because programs compare ``type(model)``.
    """
    kind, ddps = type(ddp), DistributedDataParallel
    if any(getattr(kind, name) is not getattr(ddps, name) for name in _OVERRIDDEN):
        ddp.__class__ = _with_managed_methods(kind)
    else:
        ref = weakref.ref(ddp)
        ddp.__dict__ |= {name: _bound(ref, getattr(ManagedDDP, name)) for name in _REPLACED}


def _bound(
    ref: weakref.ref[DistributedDataParallel], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A bound method that holds its module by a weak reference."""

    @begin_no_graph
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        ddp = ref()
        assert ddp is not None, "a method is called on its module"
        return function(ddp, *args, **kwargs)

    return method


_classes: Final = weakref.WeakValueDictionary[type, type[DistributedDataParallel]]()
"""Classes with the methods of ManagedDDP, by the user's class."""


def _with_managed_methods(kind: type[DistributedDataParallel]) -> type[DistributedDataParallel]:
    """A subclass of the user's class, with :class:`ManagedDDP` before DDP among its bases. All
    modules of the user's class share it: Dynamo would compile each class separately."""
    managed = _classes.get(kind)
    if managed is None:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        names["_ddp_fusion_users_class"] = kind
        managed = _classes[kind] = type(kind.__name__, (kind, ManagedDDP), names)
    return managed


def _users_class(ddp: DistributedDataParallel) -> type[DistributedDataParallel]:
    return getattr(type(ddp), "_ddp_fusion_users_class", type(ddp))


# --- Copies --------------------------------------------------------------------------------------


def _blank(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
    """An empty object that its ``__setstate__`` turns into a copy of a managed module."""
    ddp = kind.__new__(kind)
    ddp.__dict__["__setstate__"] = functools.partial(_restore, ddp)
    return ddp


def _restore(ddp: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Give an object of :func:`_blank` its state. If the flag is not set now, DDP's own reducer
    trains the copy."""
    del ddp.__dict__["__setstate__"]
    config = active_config()
    type(ddp).__setstate__(ddp, state | {USES_PYTHON_REDUCER: config is not None})
    if config is not None:
        manage_by_reducer(ddp, config, is_copy=True)
        comm_hooks(ddp).clear()  # As in DDP, a copy has no communication hook.


# --- DDP's logging data ---------------------------------------------------------------------------


def logging_data(reducer: Reducer) -> dict[str, Any]:
    """The fields that DDP's C++ reducer would have written into the logging data, except times,
    which are not measured. The order of gradients is that of the buckets. Sparse gradients do not
    lie in buckets, and are left out."""
    layout, parameters = reducer.assignment.layout, reducer.parameters.all
    is_final = reducer.assignment.is_fixed
    buckets = [b.numbers for b in layout.buckets if not b.is_sparse] if is_final else []
    sizes = [sum(parameters[number].nbytes for number in bucket) for bucket in buckets]
    order = [number for bucket in buckets for number in bucket]
    unused = () if reducer.record.copies is None else reducer.record.copies.unused
    return {
        "iteration": reducer.steps,
        "unused_parameter_size": sum(parameters[n].nbytes for n in unused),
        "has_rebuilt_buckets": int(is_final),
        "num_buckets_reduced": len(buckets),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)),
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, b)) for b in buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, order)),
    }
