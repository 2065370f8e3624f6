"""Reports the DDP modules whose gradients reducers average, their buckets, what was copied, and how
each backward was reduced."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fusion_passes.graph.text import dtype_name
from fusion_passes.reducer.backward import RunningBackward, reducers
from fusion_passes.reducer.communication import AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.launch_queue import bucket_name
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reporting.records import (
    BackwardReport,
    BucketReport,
    ModuleReport,
    ReducedIn,
    SentParameters,
)
from fusion_passes.torch_private.process_groups import backend_name

_gone: Final = list[ModuleReport]()
"""The reports of modules that were freed since the last module was constructed."""


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
    communication, group = reducer.queue.communication, reducer.module.group
    if isinstance(communication, AllReduce):
        mode = "coalesced" if communication.is_coalesced else "concat"
    else:
        mode = "hook"
    device = next(iter(reducer.parameters.kinds.values())).device
    registered, sends = reducer.memory.registered, reducer.record.sends
    return ModuleReport(
        reducer.queue.name,
        group.group_name,
        group.size(),
        backend_name(group, device),
        mode,
        name_of_hook(communication.hook) if isinstance(communication, HookCall) else "",
        reducer.steps,
        len(reducer.parameters.numbers),
        reducer.record.num_stored,
        reducer.record.decision,
        "plain" if registered is None else registered.in_words(),
        tuple(_buckets(reducer)),
        bool(reducer.module.config.shard_optimizer),
        None if sends is None else SentParameters(sends.num_bytes, sends.took_s, sends.waited_s),
    )


def _buckets(reducer: Reducer) -> Iterator[BucketReport]:
    """The reports of the buckets that are sent, in launch order."""
    if not reducer.assignment.is_fixed:
        return
    names, copied = reducer.parameters.names, reducer.record.why_copied(reducer.parameters.kinds)
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
            module=reducer.queue.name,
            group=reducer.module.group.group_name,
            dtype=dtype_name(bucket.dtype),
            num_bytes=numel * bucket.dtype.itemsize,
            sent_bytes=numel * sent_dtype.itemsize,
            scaling=scaling,
            parameters=tuple(names[number] for number in bucket.numbers),
            copied=tuple((names[n], copied[n]) for n in bucket.numbers if n in copied),
            name=bucket_name(reducer.queue.name, bucket),
        )


# --- Backwards -----------------------------------------------------------------------------------


@dataclass
class BackwardCounts:
    """Counts the backwards that averaged gradients, by how they did; calls ``after`` after each
    one."""

    after: Callable[[], None] | None = None
    _counts: Counter[tuple[tuple[str, ...], ReducedIn, str, int]] = field(default_factory=Counter)

    def note(self, run: RunningBackward, modules: Sequence[str], copied: int) -> None:
        """Note a backward that has ended and averaged the gradients of these modules; see
        :class:`BackwardReport`."""
        if run.is_traced:
            self._counts[tuple(modules), "compiled_autograd", "", 0] += 1
        else:
            self._counts[tuple(modules), "reducer", run.why_untraced, copied] += 1
        if self.after is not None:
            self.after()

    def reports(self) -> tuple[BackwardReport, ...]:
        """The reports, in the order in which the first backward of each kind ran."""
        return tuple(
            BackwardReport(modules, reduced_in, because, count, copied)
            for (modules, reduced_in, because, copied), count in self._counts.items()
        )


backward_counts: Final = BackwardCounts()
"""How many backwards were reduced in each way, and who is called after one."""
