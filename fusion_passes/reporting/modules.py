"""What the reducer of a DDP module does: its buckets, and what it had to copy in the last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fusion_passes.plan.layout import Bucket
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reductions.find import dtype_name
from fusion_passes.reporting.records import FLATTENS, BucketDocument, BucketReport
from fusion_passes.reporting.timeline import BucketTimes
from fusion_passes.torch_private.process_groups import backend_name


@dataclass(frozen=True)
class ModuleReport:
    """A DDP module whose gradients a reducer averages.

    Attributes:
        name: by number of construction on its group and by class: ``DDP 0 (Net)``.
        group: name of its process group.
        group_size: ranks of that.
        backend: that sends there: ``"gloo"``, ``"nccl"``.
        mode: how a bucket is sent: ``"concat"``, ``"coalesced"``, or ``"hook"``, by a communication
            hook.
        hook: name of that hook; empty if there is none.
        steps: how many it has averaged.
        gradients: how many are averaged in a step.
        stored: how many of them compiled backwards have stored in their buckets in the last step.
            The others are among ``copied`` of their bucket, with the reason.
        decision: in the mode ``"auto"``, why these buckets were chosen; one sentence each.
        memory: of its buckets: ``"plain"``, or what NCCL was told of it.
        buckets: in the order of their launches; none before the first step has ended, since the
            ranks agree on them there.
    """

    name: str
    group: str
    group_size: int
    backend: str
    mode: str
    hook: str
    steps: int
    gradients: int
    stored: int
    decision: tuple[str, ...]
    memory: str
    buckets: tuple[BucketDocument, ...]


def module_reports(
    times: Mapping[str, BucketTimes] = MappingProxyType({}),
    predicted_s: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> tuple[ModuleReport, ...]:
    """The modules of this process that reducers average, in the order of their construction.

    Args:
        times: when a bucket was on its way, by its name.
        predicted_s: when it was expected to be, by its name and the same clock.
    """
    return tuple(_module(reducer, times, predicted_s) for reducer in reducers.alive())


def named_buckets() -> dict[str, tuple[str, ...]]:
    """The parameters of each bucket that the ranks have agreed on, by its name in profiles."""
    return {
        reducer.bucket_name(bucket.index): _names(reducer, bucket)
        for reducer in reducers.alive()
        for bucket in buckets_of(reducer)
    }


def buckets_of(reducer: Reducer) -> Sequence[Bucket]:
    """Those that are sent, in the order of their launches."""
    if reducer.layout is None:
        return ()
    return [bucket for bucket in reducer.layout.buckets if bucket.numel or bucket.is_sparse]


def planned_times() -> tuple[dict[str, tuple[float, float]], ...]:
    """When each module's buckets are sent by its plan, by name, in seconds from the start of the
    backward; without the modules whose buckets were not planned from measurement."""
    found = []
    for reducer in reducers.alive():
        times = predicted_of(reducer)
        if times:
            found.append({reducer.bucket_name(index): pair for index, pair in times.items()})
    return tuple(found)


def predicted_of(reducer: Reducer) -> dict[int, tuple[float, float]]:
    """When its plan expects the network to begin and to end with each bucket, in seconds from the
    start of the backward, by the bucket's index; empty without such a plan."""
    predicted_ns: Mapping[int, tuple[int, int]] = getattr(reducer, "predicted", {})
    return {index: (a / 1e9, b / 1e9) for index, (a, b) in predicted_ns.items()}


def sent_bytes(reducer: Reducer, bucket: Bucket) -> int:
    """What an all-reduce of a bucket sends; of sparse gradients as if all rows were there."""
    return bucket_elements(reducer, bucket) * sent_dtype(reducer, bucket).itemsize


def sent_dtype(reducer: Reducer, bucket: Bucket) -> torch.dtype:
    """The dtype in which a bucket is sent."""
    if bucket.is_sparse:
        return bucket.dtype
    return reducer.communication.sent_dtype(bucket.dtype)


def bucket_elements(reducer: Reducer, bucket: Bucket) -> int:
    """How many elements the gradients of a bucket have."""
    return sum(reducer.parameters.kinds[number].numel for number in bucket.numbers)


def mode_of(reducer: Reducer) -> str:
    """See :class:`ModuleReport`."""
    communication = reducer.communication
    if isinstance(communication, AllReduce):
        return "coalesced" if communication.is_coalesced else "concat"
    return "hook"


def _module(
    reducer: Reducer,
    times: Mapping[str, BucketTimes],
    predicted_s: Mapping[str, tuple[float, float]],
) -> ModuleReport:
    copied, communication = reducer.why_copied(), reducer.communication
    planned_s, caps = predicted_of(reducer), _caps(reducer)
    documents = []
    for bucket in buckets_of(reducer):
        name = reducer.bucket_name(bucket.index)
        planned = planned_s.get(bucket.index)
        report = _bucket(reducer, bucket, copied, caps[bucket.index], planned)
        documents.append(BucketDocument(name, report, times.get(name), predicted_s.get(name)))
    return ModuleReport(
        reducer.name,
        reducer.group.group_name,
        reducer.group.size(),
        backend_of(reducer),
        mode_of(reducer),
        name_of_hook(communication.hook) if isinstance(communication, HookCall) else "",
        reducer.steps,
        len(reducer.numbers),
        reducer.num_stored,
        tuple(getattr(reducer, "decision", ())),
        reducer.bucket_memory.in_words(),
        tuple(documents),
    )


def _bucket(
    reducer: Reducer,
    bucket: Bucket,
    copied: Mapping[int, str],
    cap_bytes: int,
    planned_s: tuple[float, float] | None,
) -> BucketReport:
    names = reducer.parameters.names
    begin_s, end_s = planned_s or (None, None)
    is_flattened = mode_of(reducer) == "coalesced" and backend_of(reducer) == "gloo"
    return BucketReport(
        module=reducer.name,
        group=reducer.group.group_name,
        dtype=dtype_name(bucket.dtype),
        num_bytes=bucket_elements(reducer, bucket) * bucket.dtype.itemsize,
        sent_bytes=sent_bytes(reducer, bucket),
        cap_bytes=0 if planned_s is not None else cap_bytes,
        scaling="rows" if bucket.is_sparse else reducer.communication.scaling(bucket.dtype),
        parameters=_names(reducer, bucket),
        copied=tuple((names[n], copied[n]) for n in bucket.numbers if n in copied),
        note=FLATTENS if is_flattened else "",
        predicted_start_s=begin_s,
        predicted_end_s=end_s,
    )


def _caps(reducer: Reducer) -> dict[int, int]:
    """The cap, in bytes, under which each bucket was filled, by its index; 0 for sparse ones."""
    caps: dict[int, int] = {}
    count: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for bucket in buckets_of(reducer):
        kind = bucket.dtype, bucket.device
        caps[bucket.index] = 0 if bucket.is_sparse else reducer.caps.of_bucket(count[kind])
        count[kind] += not bucket.is_sparse
    return caps


def _names(reducer: Reducer, bucket: Bucket) -> tuple[str, ...]:
    return tuple(reducer.parameters.names[number] for number in bucket.numbers)


def backend_of(reducer: Reducer) -> str:
    """Name of the backend that sends a module's buckets: ``"gloo"``, ``"nccl"``."""
    device = next(iter(reducer.parameters.kinds.values())).device
    return backend_name(reducer.group, device)
