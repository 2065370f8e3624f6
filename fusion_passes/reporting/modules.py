"""Reports the DDP modules whose gradients reducers average, their buckets and what was copied."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

from fusion_passes.graph.text import dtype_name
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.launch_queue import bucket_name
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reporting.records import BucketReport, ModuleReport
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.process_groups import backend_name

_gone: Final = process_state.keep(
    list[ModuleReport](),
    "what was done for modules that were freed since the last one was constructed",
    Lifetime.PROCESS,
)


def module_reports() -> tuple[ModuleReport, ...]:
    """The reports of the modules that reducers average, in the order of their construction; if none
    is left, of the modules that were freed last: a trainer may have freed its module."""
    return tuple(_module(reducer) for reducer in reducers.alive()) or tuple(_gone)


def report_when_freed(ddp: Any, reducer: Reducer) -> weakref.finalize[..., Any]:
    """Keep a module's report when the module is freed, until another module is constructed.

    Returns:
        The finalizer, to be detached if the module gets another reducer.
    """
    _gone.clear()
    finalizer = weakref.finalize(ddp, _note_gone, reducer)
    finalizer.atexit = False
    return finalizer


def _note_gone(reducer: Reducer) -> None:
    if reducer in reducers.alive():
        _gone.append(_module(reducer))


def _module(reducer: Reducer) -> ModuleReport:
    communication = reducer.queue.communication
    if isinstance(communication, AllReduce):
        mode = "coalesced" if communication.is_coalesced else "concat"
    else:
        mode = "hook"
    device = next(iter(reducer.parameters.kinds.values())).device
    registered = reducer.memory.registered
    return ModuleReport(
        reducer.name,
        reducer.group.group_name,
        reducer.group.size(),
        backend_name(reducer.group, device),
        mode,
        name_of_hook(communication.hook) if isinstance(communication, HookCall) else "",
        reducer.steps,
        len(reducer.parameters.numbers),
        reducer.record.num_stored,
        reducer.record.decision,
        "plain" if registered is None else registered.in_words(),
        tuple(_buckets(reducer)),
        reducer.config.shard_optimizer,
    )


def _buckets(reducer: Reducer) -> Iterator[BucketReport]:
    """The reports of the buckets that are sent, in launch order."""
    if not reducer.assignment.is_fixed:
        return
    names, copied = reducer.parameters.names, reducer.why_copied()
    for bucket in reducer.assignment.layout.buckets:
        if not (bucket.numel or bucket.is_sparse):
            continue
        # Sparse gradients count with all of their rows.
        numel = sum(reducer.parameters.kinds[number].numel for number in bucket.numbers)
        if bucket.is_sparse:
            sent_dtype, scaling = bucket.dtype, "rows"
        else:
            sent_dtype = reducer.queue.communication.sent_dtype(bucket.dtype)
            scaling = reducer.queue.communication.scaling(bucket.dtype)
        yield BucketReport(
            module=reducer.name,
            group=reducer.group.group_name,
            dtype=dtype_name(bucket.dtype),
            num_bytes=numel * bucket.dtype.itemsize,
            sent_bytes=numel * sent_dtype.itemsize,
            scaling=scaling,
            parameters=tuple(names[number] for number in bucket.numbers),
            copied=tuple((names[n], copied[n]) for n in bucket.numbers if n in copied),
            name=bucket_name(reducer.name, bucket),
        )
