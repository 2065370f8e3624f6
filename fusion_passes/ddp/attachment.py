"""Gives a DDP module a reducer of the package: its parameters, the caps of its buckets, and the
settings that ranks must have in common."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import OPTION, FusionConfig, __version__
from fusion_passes.ddp.forward import prepare_forward
from fusion_passes.ddp.gloo_exit import pause_at_exit, pause_without_groups
from fusion_passes.graph.collectives import all_reduce
from fusion_passes.layout.caps import BucketCaps, bucket_caps, default_caps, given_caps
from fusion_passes.layout.layout import GradientKind, Layout, ParameterNumber
from fusion_passes.reducer.averaged_module import STATE, AveragedModule, State
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import REDUCE_DTYPE_OF, AllReduce
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.reducer import REDUCER, Reducer, reducer_of
from fusion_passes.reducer.used_parameters import used_parameters
from fusion_passes.torch_private.autograd import RemovableHandle, gradient_dtype
from fusion_passes.torch_private.ddp import (
    DEFAULT_FIRST_BUCKET_BYTES,
    delayed_parameters,
    parameters_of,
)
from fusion_passes.torch_private.process_groups import backend_name
from fusion_passes.torch_private.registered_memory import why_not_registered


def attach_reducer(ddp: DistributedDataParallel, config: FusionConfig, label: str) -> None:
    """Give a module a new reducer, which replaces the one that it may have. If this fails, the
    module keeps the old one."""
    old: Reducer | None = ddp.__dict__.get(REDUCER)
    group = ddp.process_group
    backend = backend_name(group, ddp.device)
    if backend == "gloo":
        pause_at_exit()
        if old is None:
            weakref.finalize(ddp, pause_without_groups).atexit = False
    communication = (
        old.queue.communication
        if old is not None
        else AllReduce(
            group,
            backend,
            is_coalesced=config.reduces_by == "coalesced",
            dtype=REDUCE_DTYPE_OF[config.reduce_dtype],
            scaling_option=config.scales_by,
        )
    )
    parameters = numbered_parameters(ddp)
    if config.shard_optimizer:
        assert isinstance(communication, AllReduce), "hooks are refused"
        parameters, communication = reducers.slices.shard(label, parameters, communication)
    module = AveragedModule(ddp, label, group, config)
    reducer = Reducer(
        module,
        parameters,
        caps=bucket_caps(config, caps_of_ddp(ddp)),
        communication=communication,
        used=used_parameters(module, parameters),
        hooks_of_others=reducers.hooks,
    )
    # If a model is wrapped again, the AccumulateGrad nodes of its parameters outlive this reducer,
    # and so would the hooks on them.
    weakref.finalize(reducer, remove_handles, reducer.hooks.handles).atexit = False
    ref = weakref.ref(reducer)
    try:
        for n in parameters.kinds:
            name = f"{module.name_in_graphs}#{n}"
            awaited = reducer.hooks.awaited
            hook = _Hook(ref, n, parameters.all[n], name, group.size(), awaited)
            reducer.hooks.add(n, hook.accumulated)
    except BaseException:
        remove_handles(reducer.hooks.handles)
        raise
    if old is not None:
        detach_reducer(old)
    if isinstance(communication, AllReduce):
        communication.group, communication.backend = group, backend
    setattr(ddp, STATE, State.IDLE)
    reducers.slices.wait_in_forward(ddp, reducer)
    prepare_forward(ddp)
    ddp.__dict__[REDUCER] = reducer
    reducers.add(reducer)
    reducer.record.when_freed = reducers.slices.report_when_freed(ddp, reducer)


@dataclass(slots=True)
class _Hook:
    """The hook on the AccumulateGrad node of a parameter: a method, which takes two thirds of the
    time of a ``functools.partial`` or a closure, because it lies in less memory."""

    ref: weakref.ref[Reducer]
    number: ParameterNumber
    parameter: nn.Parameter
    name: str
    world_size: int
    awaited: set[ParameterNumber]

    def accumulated(self, _: Any, gradients: Any) -> None:
        if is_dynamo_compiling():
            reduce_in_graph(self.parameter, self.name, self.world_size)
        # Here and not in the reducer, because each gradient of each step comes by.
        elif self.number in self.awaited and reducers.hooks.none_at == RemovableHandle.next_id:
            self.awaited.discard(self.number)
        else:
            reducer = self.ref()
            if reducer is not None:
                reducer.accumulated(self.number, is_defined=gradients[0] is not None)


def reduce_in_graph(parameter: nn.Parameter, name: str, world_size: int) -> None:
    """Average ``parameter.grad`` over the ranks in place, as DDP's Python reducer does. Called
    while Dynamo traces a backward."""
    assert parameter.grad is not None, "it has been accumulated"
    parameter.grad.copy_(all_reduce(parameter.grad / world_size, "sum", name))


def detach_reducer(reducer: Reducer) -> None:
    """End the work of a reducer: its module gets another one, or none."""
    reducers.discard(reducer)
    if reducer.record.when_freed is not None:
        reducer.record.when_freed.detach()
    reducer.memory.release()
    remove_handles(reducer.hooks.handles)


def remove_handles(handles: list[Any]) -> None:
    """Remove the hooks with these handles."""
    for handle in handles:
        handle.remove()
    handles.clear()


def undo_attachment(ddp: DistributedDataParallel) -> None:
    """Remove the reducer, with its hooks, of a module whose constructor fails."""
    if REDUCER in ddp.__dict__:
        detach_reducer(ddp.__dict__.pop(REDUCER))


# --- Parameters and caps --------------------------------------------------------------------------


def numbered_parameters(ddp: DistributedDataParallel) -> Parameters:
    """The parameters of a module, numbered as DDP numbers them."""
    parameters = parameters_of(ddp)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    sparse, delayed = _sparse_ids(ddp.module), set(map(id, delayed_parameters(ddp)))
    return Parameters(
        parameters,
        [names.get(id(parameter), "?") for parameter in parameters],
        [strides_to_send(parameter) for parameter in parameters],
        {
            ParameterNumber(number): GradientKind(
                p.numel(), gradient_dtype(p), p.device, id(p) in sparse, id(p) in delayed
            )
            for number, p in enumerate(parameters)
            if p.requires_grad
        },
    )


def _sparse_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters from which DDP expects sparse gradients: those of embeddings with
    ``sparse=True``."""
    return {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        for parameter in layer.parameters(recurse=False)
    }


def caps_of_ddp(ddp: DistributedDataParallel) -> BucketCaps:
    """The caps of a module's buckets by DDP's arguments alone, before any option of the flag."""
    if not ddp.bucket_bytes_cap_default:
        return given_caps(int(ddp.bucket_bytes_cap), ddp.bucket_bytes_cap_list)
    sparse = _sparse_ids(ddp.module)
    gradient_bytes = sum(p.nbytes for p in parameters_of(ddp) if id(p) not in sparse)
    return default_caps(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def strides_to_send(parameter: Tensor) -> tuple[int, ...]:
    """The strides in which a gradient is sent: those of the parameter if it is dense, otherwise
    contiguous ones."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())


# --- What ranks must have in common ---------------------------------------------------------------


def settings_of(ddp: DistributedDataParallel, config: FusionConfig) -> dict[str, Any]:
    """The settings that must be the same on all ranks, by name."""
    reducer = reducer_of(ddp)
    names = reducer.parameters.names
    return {
        "the release of fusion_passes": __version__,
        OPTION: asdict(config),
        "bucket_cap_mb of DistributedDataParallel": caps_of_ddp(ddp).in_mib(),
        "find_unused_parameters of DistributedDataParallel": ddp.find_unused_parameters,
        "static_graph of DistributedDataParallel": bool(ddp.static_graph),
        "parameters that require a gradient": [names[n] for n in reducer.parameters.kinds],
        "embeddings with sparse=True": [
            names[n] for n, kind in reducer.parameters.kinds.items() if kind.is_sparse
        ],
        "the first buckets": _in_brief(reducer.assignment.layout),
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
    config = reducer.module.config
    if config.memory == "plain":
        return ""
    devices = [kind.device for kind in reducer.parameters.kinds.values()]
    return why_not_registered(group, devices, averages=config.scaling == "collective")


def refuse_memory(reducer: Reducer, group: Any) -> None:
    """Raise the reason of :func:`_why_no_memory`, if there is one, as an error. In the constructor
    all ranks raise it, because :func:`compare_settings` has compared the reason."""
    why = _why_no_memory(reducer, group)
    if why:
        raise ValueError(
            f"FusionConfig.memory = {reducer.module.config.memory!r} of {reducer.module.label} "
            f"{why}, or set memory = 'plain'."
        )
