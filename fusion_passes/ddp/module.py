"""Managed DDP modules: a :class:`fusion_passes.reducer.reducer.Reducer` averages their gradients
in place of DDP's own reducer."""

from __future__ import annotations

import atexit
import functools
import hashlib
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import OPTION, FusionConfig
from fusion_passes.ddp.forward import (
    ManagedForward,
    broadcast_buffers,
    prepare_buffers,
    refuse_unfinished,
    sends_buffers,
)
from fusion_passes.ddp.own_reducer import warn_own_reducer
from fusion_passes.ddp.tensor_parallel import make_dtensors_when_read
from fusion_passes.flag import active_config
from fusion_passes.graph.collectives import all_reduce
from fusion_passes.layout.caps import BucketCaps, bucket_caps, default_caps, given_caps
from fusion_passes.layout.layout import GradientKind, Layout
from fusion_passes.reducer.backward import reducers, why_failed
from fusion_passes.reducer.communication import SENT_AS, AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.rank_errors import compare_settings, meet_ranks
from fusion_passes.reducer.reducer import (
    EXPECTED,
    LOCAL,
    REDUCER,
    UNFINISHED,
    Parameters,
    Reducer,
    reducer_of,
)
from fusion_passes.reducer.scaling import REDUCE_DTYPE_OF
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import gradient_dtype
from fusion_passes.torch_private.ddp import (
    DEFAULT_FIRST_BUCKET_BYTES,
    HOOKS_OF_REDUCER,
    USES_PYTHON_REDUCER,
    comm_hooks,
    common_rank,
    ddp_logging_data,
    delayed_parameters,
    divides_by_initial_size,
    give_own_reducer,
    hooks_of_reducer,
    log_comm_hook,
    parameters_of,
    register_buffer_comm_hook,
    register_with_reducer,
    set_static_graph,
    update_process_group,
)
from fusion_passes.torch_private.dynamo import begin_no_graph
from fusion_passes.torch_private.process_groups import backend_name
from fusion_passes.torch_private.registered_memory import why_not_registered
from fusion_passes.version import __version__


class ManagedDDP(ManagedForward):
    """The methods of a managed module that replace DDP's: see :func:`_attach`."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average as a known hook of :data:`SENT_AS` would. Call any other hook with the module's
        buckets, or have DDP's own reducer call it if :func:`_reason_against_hook` says so."""
        group = dist.group.WORLD if state is None else state
        is_known = hook in tuple(SENT_AS)  # A tuple, because a hook may be unhashable.
        if is_known and group is self.process_group:
            _accept_comm_hook(self, hook, state)
            return
        self._check_comm_hook(hook)
        _check_first_hook(self)
        _check_reduce_dtype(reducer_of(self).config, hook)
        reason = _reason_against_hook(self, name_of_hook(hook))
        if reason is not None:
            hand_over(self, reason)
            DistributedDataParallel.register_comm_hook(self, state, hook)
            return
        _note_comm_hook(self, hook, state)
        ref = weakref.ref(self)  # Not to the reducer, which _update_process_group replaces.
        reducer = reducer_of(self)
        reducer.communication = HookCall(
            hook, state, reducer.parameters.all, lambda: reducer_of(ref()).hooked_buckets
        )

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        _accept_comm_hook(self, comm_hook_type)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        hand_over(self, "a hook of yours synchronises its buffers")
        register_buffer_comm_hook(self, *args, **kwargs)

    def _check_and_sync_module_buffers(self) -> None:
        if getattr(self, UNFINISHED) is not None:
            refuse_unfinished(self)
        if sends_buffers(self):
            broadcast_buffers(self, common_rank(self, is_candidate=False))

    def _match_all_reduce_for_bwd_pass(self) -> None:
        reducer = reducer_of(self)
        communication = reducer.communication
        if isinstance(communication, AllReduce) and not divides_by_initial_size(self):
            # Have the collective sum, as on the other ranks. Zeros need no division.
            communication.count_ranks = lambda: 1.0
        try:
            reducer.reduce_zeros()
        except Exception as error:
            said = why_failed([reducer], error)
            if said is None:
                raise
            raise said from error

    def _match_unused_params_allreduce(self) -> None:
        """Do nothing: :meth:`Reducer.reduce_zeros` has all-reduced the used-parameter map."""

    def _update_process_group(self, new_process_group: Any) -> None:
        before, reducer = self.process_group, reducer_of(self)
        _refuse_memory(reducer, new_process_group)
        try:
            update_process_group(self, new_process_group)
            attach_reducer(self, reducer.config, reducer.label)
        except BaseException:  # The module still has its previous reducer.
            update_process_group(self, before)
            raise

    def _set_static_graph(self) -> None:
        """Declare the graph static, which as in DDP replaces ``find_unused_parameters``."""
        set_static_graph(self)
        reducer_of(self).is_static = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """DDP's logging data, with the fields that its C++ reducer would have filled."""
        return {**ddp_logging_data(self), **logging_data(reducer_of(self))}

    def __reduce_ex__(self, _: object) -> Any:
        """Reduce the module to a state without its reducer and :class:`ManagedDDP`'s methods: its
        copy gets its own of these from :func:`_restore`."""
        left_out = {*_REPLACED, REDUCER}
        state = {name: value for name, value in self.__getstate__().items() if name not in left_out}
        return _blank, (_users_class(self),), state | {HOOKS_OF_REDUCER: []}


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
        setattr(self._ddp(), EXPECTED, True)

    def _remove_autograd_hooks(self) -> None:
        ddp = self._ddp()
        assert ddp is not None, "it is asked to"
        _remove_hooks(reducer_of(ddp))

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
        _remove_handles(hooks_of_reducer(ddp))
        setattr(ddp, LOCAL, False)
        ddp.reducer = IdleCppReducer(ddp)  # type: ignore[assignment]
        attach_reducer(ddp, config, label)
        reducer = reducer_of(ddp)
        settings = {} if is_copy else _settings_of(ddp, config)
        # A fake process group has no other ranks.
        if not is_copy and backend_name(reducer.group, ddp.device) != "fake":
            meet_ranks(reducer.group, label, number, is_in_step=is_in_step)
        numbers[kind] = number  # Either all ranks count this module, or none does.
        if not is_copy:
            compare_settings(reducer.group, label, settings, ddp.device)
        _refuse_memory(reducer, ddp.process_group)
        if config.mode == "auto" and is_copy:
            reducer.decision = ("the buckets of a copy are filled up to caps",)
        elif config.mode == "auto":
            reducers.learn_layout(reducer)
        _attach(ddp)
    except BaseException:
        discard(ddp)
        raise


def discard(ddp: DistributedDataParallel) -> None:
    """Remove the hooks and the reducer of a module whose constructor fails."""
    _remove_handles(hooks_of_reducer(ddp))
    if REDUCER in ddp.__dict__:
        _remove_hooks(ddp.__dict__.pop(REDUCER))


def _settings_of(ddp: DistributedDataParallel, config: FusionConfig) -> dict[str, Any]:
    """The settings that must be the same on all ranks, by name."""
    reducer = reducer_of(ddp)
    names = reducer.parameters.names
    return {
        "the release of fusion_passes": __version__,
        OPTION: asdict(config),
        "bucket_cap_mb of DistributedDataParallel": _caps_of_ddp(ddp).in_mib(),
        "find_unused_parameters of DistributedDataParallel": ddp.find_unused_parameters,
        "static_graph of DistributedDataParallel": bool(ddp.static_graph),
        "parameters that require a gradient": [names[n] for n in reducer.numbers],
        "embeddings with sparse=True": [
            names[n] for n, kind in reducer.parameters.kinds.items() if kind.is_sparse
        ],
        "the first buckets": _in_brief(reducer.layout),
        "parameters of delay_all_reduce_named_params": [
            names[n] for n, kind in reducer.parameters.kinds.items() if kind.is_delayed
        ],
        "why NCCL can register no memory": _why_no_memory(reducer, ddp.process_group),
    }


def _in_brief(layout: Layout) -> str:
    """The number of buckets, and a digest of the parameters, size and dtype of each bucket."""
    buckets = [(bucket.numbers, bucket.numel, str(bucket.dtype)) for bucket in layout.buckets]
    digest = hashlib.sha256(repr(buckets).encode()).hexdigest()
    return f"{len(buckets)} (digest {digest[:16]})"


def _why_no_memory(reducer: Reducer, group: Any) -> str:
    """Why buckets cannot have the memory of option ``memory``; empty if they can."""
    if reducer.config.memory == "plain":
        return ""
    devices = [kind.device for kind in reducer.parameters.kinds.values()]
    return why_not_registered(group, devices, averages=reducer.config.scaling == "collective")


def _refuse_memory(reducer: Reducer, group: Any) -> None:
    """Raise the reason of :func:`_why_no_memory`, if there is one, as an error. In the constructor
    all ranks raise it, because :func:`compare_settings` has compared the reason."""
    why = _why_no_memory(reducer, group)
    if why:
        raise ValueError(
            f"FusionConfig.memory = {reducer.config.memory!r} of {reducer.label} {why}, or set "
            "memory = 'plain'."
        )


_count: Final = process_state.keep(
    weakref.WeakKeyDictionary[Any, dict[str, int]](),
    "the numbers of the last module and of the last copy on each process group; kept, since the "
    "group's store knows them",
    Lifetime.GROUP,
    reset=lambda _: None,
)


def attach_reducer(ddp: DistributedDataParallel, config: FusionConfig, label: str) -> None:
    """Give a module a new reducer, which replaces the one that it may have. If this fails, the
    module keeps the old one."""
    old: Reducer | None = ddp.__dict__.get(REDUCER)
    group = ddp.process_group
    backend = backend_name(group, ddp.device)
    if backend == "gloo":
        pause_at_exit()
        if old is None:
            weakref.finalize(ddp, _pause_without_groups).atexit = False
    communication = (
        old.communication
        if old is not None
        else AllReduce(
            group,
            backend,
            is_coalesced=config.reduces_by == "coalesced",
            dtype=REDUCE_DTYPE_OF[config.reduce_dtype],
            scaling_option=config.scales_by,
        )
    )
    parameters = parameters_of(ddp)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    sparse = _sparse_ids(ddp.module)
    delayed = set(map(id, delayed_parameters(ddp)))
    reducer = Reducer(
        ddp,
        Parameters(
            parameters,
            [names.get(id(parameter), "?") for parameter in parameters],
            [strides_to_send(parameter) for parameter in parameters],
            {
                n: GradientKind(
                    p.numel(), gradient_dtype(p), p.device, id(p) in sparse, id(p) in delayed
                )
                for n, p in enumerate(parameters)
                if p.requires_grad
            },
        ),
        group=group,
        label=label,
        config=config,
        caps=bucket_caps(config, _caps_of_ddp(ddp)),
        communication=communication,
    )
    # If a model is wrapped again, the AccumulateGrad nodes of its parameters outlive this reducer,
    # and so would the hooks on them.
    weakref.finalize(reducer, _remove_handles, reducer.hooks).atexit = False
    ref = weakref.ref(reducer)
    try:
        for n in reducer.numbers:
            name = f"{name_in_graphs(reducer)}#{n}"
            hook = functools.partial(_accumulated, ref, n, parameters[n], name, group.size())
            reducer.hook_behind(n, hook)
    except BaseException:
        _remove_handles(reducer.hooks)
        raise
    if old is not None:
        _remove_hooks(old)
    if isinstance(communication, AllReduce):
        communication.group, communication.backend = group, backend
    setattr(ddp, EXPECTED, False)
    setattr(ddp, UNFINISHED, None)
    prepare_buffers(ddp)
    ddp.__dict__[REDUCER] = reducer
    reducers.add(reducer)
    reducer.when_freed = reducers.report_when_freed(ddp, reducer)


def _accumulated(
    ref: weakref.ref[Reducer],
    number: int,
    parameter: nn.Parameter,
    name: str,
    world_size: int,
    _: Any,
    gradients: Any,
) -> None:
    if torch.compiler.is_dynamo_compiling():
        reduce_in_graph(parameter, name, world_size)
        return
    reducer = ref()
    if reducer is not None:
        reducer.accumulated(number, is_defined=gradients[0] is not None)


def reduce_in_graph(parameter: nn.Parameter, name: str, world_size: int) -> None:
    """Average ``parameter.grad`` over the ranks in place, as DDP's Python reducer does. Called
    while Dynamo traces a backward."""
    assert parameter.grad is not None, "it has been accumulated"
    parameter.grad.copy_(all_reduce(parameter.grad / world_size, "sum", name))


def name_in_graphs(reducer: Reducer) -> str:
    """The name of a module's process group in traced graphs, without the parameter's number."""
    return f"{reducer.group.group_name}/{reducer.label.partition(' (')[0].replace(' ', '').lower()}"


def _remove_hooks(reducer: Reducer) -> None:
    reducers.discard(reducer)
    if reducer.when_freed is not None:
        reducer.when_freed.detach()
    reducer.release_memory()
    _remove_handles(reducer.hooks)


def _remove_handles(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def hand_over(ddp: DistributedDataParallel, reason: str) -> None:
    """Have DDP's own reducer train a managed module from now on, and warn with the reason. All
    ranks of its process group must do this between the same two steps."""
    ddp.__class__ = _users_class(ddp)
    for name in _REPLACED:
        ddp.__dict__.pop(name, None)
    _remove_hooks(ddp.__dict__.pop(REDUCER))
    give_own_reducer(ddp)
    for hook, state in comm_hooks(ddp):
        register_with_reducer(ddp, hook, state)
    warn_own_reducer(ddp, reason)


def _attach(ddp: DistributedDataParallel) -> None:
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


_classes: Final = process_state.keep(
    weakref.WeakValueDictionary[type[DistributedDataParallel], type[DistributedDataParallel]](),
    "classes with the methods of ManagedDDP, by the user's class",
    Lifetime.MODULE,
    reset=weakref.WeakValueDictionary.clear,
)


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


# --- Parameters -----------------------------------------------------------------------------------


def _sparse_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters from which DDP expects sparse gradients: those of embeddings with
    ``sparse=True``."""
    return {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        for parameter in layer.parameters(recurse=False)
    }


def _caps_of_ddp(ddp: DistributedDataParallel) -> BucketCaps:
    """The caps of a module's buckets by DDP's arguments alone, before any option of the flag."""
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    sparse = _sparse_ids(ddp.module)
    gradient_bytes = sum(p.nbytes for p in parameters_of(ddp) if id(p) not in sparse)
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    """The strides in which a gradient is sent: those of the parameter if it is dense, otherwise
    contiguous ones."""
    if _is_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())


def _is_dense(value: Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense, with its dimensions in any order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# --- Communication hooks -------------------------------------------------------------------------


def _check_first_hook(ddp: DistributedDataParallel) -> None:
    if comm_hooks(ddp):
        raise RuntimeError("register_comm_hook can only be called once.")


def _accept_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object = None) -> None:
    """Send a managed module's gradients as a known hook would send them."""
    _check_first_hook(ddp)
    if SENT_AS[hook] is not None and reducer_of(ddp).config.memory == "registered":
        raise ValueError(
            "FusionConfig.memory = 'registered' needs gradients that are sent as they lie, and "
            f"communication hook {name_of_hook(hook)} sends a copy of them. Set memory = 'plain', "
            "or leave the hook out."
        )
    _note_comm_hook(ddp, hook, state)
    communication = reducer_of(ddp).communication
    assert isinstance(communication, AllReduce), "it has no other hook"
    communication.dtype = SENT_AS[hook]


def _reason_against_hook(ddp: DistributedDataParallel, name: str) -> str | None:
    """Why DDP's own reducer must call a communication hook; ``None`` if the package's can."""
    if name.startswith("_hook_then_optimizer."):  # The hook of ``_register_fused_optim``.
        return (
            f"its communication hook {name} steps an optimizer while a compiled backward may still "
            "read the parameters. To fuse, step the optimizer after the backward"
        )
    if any(kind.is_sparse for kind in reducer_of(ddp).parameters.kinds.values()):
        return (
            f"it has sparse gradients and communication hook {name}, which is to be given them. To "
            "fuse, construct its embeddings with sparse=False"
        )
    return None


def _note_comm_hook(ddp: DistributedDataParallel, hook: Any, state: object) -> None:
    """Add a communication hook to DDP's list and logging data; DDP's reducer does not call it."""
    comm_hooks(ddp).append((hook, state))
    log_comm_hook(ddp, name_of_hook(hook))


def _check_reduce_dtype(config: FusionConfig, hook: Any) -> None:
    """Refuse the option ``reduce_dtype`` beside a communication hook, which decides the dtype."""
    if config.reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={config.reduce_dtype!r} of ddp_fusion contradicts communication hook "
            f"{name_of_hook(hook)}, which says itself in which dtype gradients are sent. Leave the "
            "option out, or the hook."
        )


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
    which are not measured. Sparse gradients do not lie in buckets, and are left out."""
    layout, parameters = reducer.layout, reducer.parameters.all
    is_final = reducer.has_rebuilt_buckets
    buckets = [b.numbers for b in layout.buckets if not b.is_sparse] if is_final else []
    sizes = [sum(parameters[number].nbytes for number in bucket) for bucket in buckets]
    order = [number for bucket in buckets for number in bucket]
    return {
        "iteration": reducer.steps,
        "unused_parameter_size": 0,
        "has_rebuilt_buckets": int(is_final),
        "num_buckets_reduced": len(buckets),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)),
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, b)) for b in buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, order)),
    }


# --- The end of a process -------------------------------------------------------------------------

# A Gloo thread may hold the last reference to a bucket. It drops the reference right after its
# collective, and needs the GIL for that. A finalizing interpreter ends the threads that ask for the
# GIL; if it ends one of Gloo's, the whole process aborts ("terminate called without an active
# exception", torch 2.11 to 2.15, before Python 3.14). Seen in 1 of 56 runs of two ranks that ended
# right after their last step, on a busy machine.
#
# Likewise, the destructor of a Gloo process group joins the group's threads and holds the GIL
# meanwhile. It hangs if one of those threads is dropping its last collective. Seen with eager DDP
# alone, too, in 1 of 7 runs on a busy machine, when a function that had destroyed the groups
# returned.


@process_state.once("whether a pause at the program's end is registered")
def pause_at_exit() -> None:
    """Register a pause at the program's end, in which Gloo's threads can take the GIL."""
    atexit.unregister(_pause)  # One that was registered before a reset.
    atexit.register(_pause)


def _pause_without_groups() -> None:
    """Pause before a module is freed after all process groups were destroyed: the module may hold
    the last reference to its group."""
    if not dist.is_initialized():
        _pause()


def _pause() -> None:
    """Wait thousands of times as long as a running thread needs; short beside a program's start."""
    time.sleep(0.05)
