"""What the reducers of DDP modules do: their buckets, what they had to copy in the last step, and
when the network should have been busy with each bucket, by what a profile says that it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from fusion_passes.plan.layout import Bucket
from fusion_passes.profile.files import known_profiles, look_up
from fusion_passes.profile.records import Kind, Place, Profile, Site, site_of
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce, HookCall, name_of_hook
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reductions.find import dtype_name
from fusion_passes.reporting.records import BucketReport, ModuleReport
from fusion_passes.reporting.table import FLATTENS
from fusion_passes.reporting.timeline import BucketTimes, RankSteps
from fusion_passes.torch_private.process_groups import backend_name

Predicted: TypeAlias = tuple[dict[str, tuple[float, float]], ...]
"""As :attr:`fusion_passes.reporting.timeline.Timeline.predicted`."""

PLANNED: Final = "by the plan, from estimated or measured times of compute and the network's costs"
NO_PROFILE: Final = (
    "nothing, because nobody has measured this network: torchrun ... -m fusion_passes.profile does"
)
NOT_HERE: Final = "nothing here: rank 0 knows where all ranks are"


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
    """The parameters of each bucket once these are rebuilt, by its name in profiles."""
    return {
        reducer.bucket_name(bucket.index): _names(reducer, bucket)
        for reducer in reducers.alive()
        for bucket in _buckets_of(reducer)
    }


def _buckets_of(reducer: Reducer) -> Sequence[Bucket]:
    """Those that are sent, in the order of their launches."""
    if not reducer.has_rebuilt_buckets:
        return ()
    return [bucket for bucket in reducer.layout.buckets if bucket.numel or bucket.is_sparse]


def _sent_bytes(reducer: Reducer, bucket: Bucket) -> int:
    """What an all-reduce of a bucket sends; of sparse gradients as if all rows were there."""
    return _elements(reducer, bucket) * _sent_dtype(reducer, bucket).itemsize


def _sent_dtype(reducer: Reducer, bucket: Bucket) -> torch.dtype:
    """The dtype in which a bucket is sent."""
    if bucket.is_sparse:
        return bucket.dtype
    return reducer.communication.sent_dtype(bucket.dtype)


def _elements(reducer: Reducer, bucket: Bucket) -> int:
    """How many elements the gradients of a bucket have."""
    return sum(reducer.parameters.kinds[number].numel for number in bucket.numbers)


def _mode_of(reducer: Reducer) -> str:
    """How a module's buckets are sent: :attr:`ModuleReport.mode`."""
    communication = reducer.communication
    if isinstance(communication, AllReduce):
        return "coalesced" if communication.is_coalesced else "concat"
    return "hook"


def _module(
    reducer: Reducer,
    times: Mapping[str, BucketTimes],
    predicted_s: Mapping[str, tuple[float, float]],
) -> ModuleReport:
    communication = reducer.communication
    return ModuleReport(
        reducer.name,
        reducer.group.group_name,
        reducer.group.size(),
        _backend_of(reducer),
        _mode_of(reducer),
        name_of_hook(communication.hook) if isinstance(communication, HookCall) else "",
        reducer.steps,
        len(reducer.numbers),
        reducer.num_stored,
        reducer.decision,
        reducer.bucket_memory.in_words(),
        _bucket_reports(reducer, times, predicted_s),
    )


def _bucket_reports(
    reducer: Reducer,
    times: Mapping[str, BucketTimes],
    predicted_s: Mapping[str, tuple[float, float]],
) -> tuple[BucketReport, ...]:
    names, copied = reducer.parameters.names, reducer.why_copied()
    planned_s, caps = _planned_of(reducer), _caps(reducer)
    is_flattened = _mode_of(reducer) == "coalesced" and _backend_of(reducer) == "gloo"
    reports = []
    for bucket in _buckets_of(reducer):
        name, planned = reducer.bucket_name(bucket.index), planned_s.get(bucket.index)
        report = BucketReport(
            module=reducer.name,
            group=reducer.group.group_name,
            dtype=dtype_name(bucket.dtype),
            num_bytes=_elements(reducer, bucket) * bucket.dtype.itemsize,
            sent_bytes=_sent_bytes(reducer, bucket),
            cap_bytes=0 if planned is not None else caps[bucket.index],
            scaling="rows" if bucket.is_sparse else reducer.communication.scaling(bucket.dtype),
            parameters=_names(reducer, bucket),
            copied=tuple((names[n], copied[n]) for n in bucket.numbers if n in copied),
            note=FLATTENS if is_flattened else "",
            planned_s=planned,
            name=name,
            times=times.get(name),
            predicted_s=predicted_s.get(name),
        )
        reports.append(report)
    return tuple(reports)


def _caps(reducer: Reducer) -> dict[int, int]:
    """The cap, in bytes, under which each bucket was filled, by its index; 0 for sparse ones."""
    caps: dict[int, int] = {}
    count: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for bucket in _buckets_of(reducer):
        kind = bucket.dtype, bucket.device
        caps[bucket.index] = 0 if bucket.is_sparse else reducer.caps.of_bucket(count[kind])
        count[kind] += not bucket.is_sparse
    return caps


def _names(reducer: Reducer, bucket: Bucket) -> tuple[str, ...]:
    return tuple(reducer.parameters.names[number] for number in bucket.numbers)


def _backend_of(reducer: Reducer) -> str:
    """Name of the backend that sends a module's buckets: ``"gloo"``, ``"nccl"``."""
    device = next(iter(reducer.parameters.kinds.values())).device
    return backend_name(reducer.group, device)


# --- When the network should have been busy ------------------------------------------------------


def this_site() -> Site:
    """Where this rank is, with the device of its first module."""
    devices = (kind.device for r in reducers.alive() for kind in r.parameters.kinds.values())
    return site_of(next(devices, torch.device("cpu")))


def predictions(mine: RankSteps, ranks: Sequence[RankSteps]) -> tuple[Predicted, str]:
    """When the network should have been busy with buckets: with ``"auto"``, the plan says that
    before a step has run. In other modes it is known when a bucket was launched, and a profile of
    the network that somebody has measured says the rest.

    Args:
        mine: what this rank has recorded.
        ranks: what all ranks have that have answered.

    Returns:
        The times, and from what they are known, or why they are not.
    """
    planned = []
    for reducer in reducers.alive():
        times = _planned_of(reducer)
        if times:
            planned.append({reducer.bucket_name(index): pair for index, pair in times.items()})
    return (tuple(planned), PLANNED) if planned else _by_profile(mine, ranks)


def _planned_of(reducer: Reducer) -> dict[int, tuple[float, float]]:
    """When its plan expects the network to begin and to end with each bucket, in seconds from the
    start of the backward, by the bucket's index; empty without such a plan."""
    return {index: (a / 1e9, b / 1e9) for index, (a, b) in reducer.predicted.items()}


def _by_profile(mine: RankSteps, ranks: Sequence[RankSteps]) -> tuple[Predicted, str]:
    """When the network should have been busy with the buckets that this rank has launched: with one
    after the other, each for as long as its profile says.

    Args:
        mine: what this rank has recorded.
        ranks: what all ranks have that have answered.

    Returns:
        By the clock of a step, and from what that is known, or why it is not.
    """
    sites = {item.rank: item.site for item in ranks}
    averaging = [reducer for reducer in reducers.alive() if reducer.group.size() > 1]
    if not averaging:
        return (), ""
    if any(rank not in sites for reducer in averaging for rank in _ranks_of(reducer)):
        return (), NOT_HERE
    costs_ns: dict[str, int] = {}
    profiles: dict[str, Profile] = {}
    for reducer in averaging:
        here = [sites[rank] for rank in _ranks_of(reducer)]
        place = Place.of(here, _backend_of(reducer), torch.__version__)
        profile = known_profiles.get(reducer.group) or _stored_profile(place)
        if profile is None:
            return (), NO_PROFILE
        profiles[profile.digest()] = profile
        for bucket in _buckets_of(reducer):
            # What a hook sends, and how many rows, nobody knows before.
            if _mode_of(reducer) != "hook" and not bucket.is_sparse:
                costs_ns[reducer.bucket_name(bucket.index)] = _cost_ns(reducer, profile, bucket)
    launched = {name: item.launched_s for name, item in mine.bucket_times(costs_ns).items()}
    found: dict[str, tuple[float, float]] = {}
    free_s = 0.0
    for name in sorted(launched, key=launched.__getitem__):
        begin_s = max(free_s, launched[name])
        free_s = begin_s + costs_ns[name] / 1e9
        found[name] = begin_s, free_s
    used = ", ".join(f"{digest} ({item.place})" for digest, item in profiles.items())
    return (found,), f"from when buckets were launched, and from what they cost by profile {used}"


def _ranks_of(reducer: Reducer) -> list[int]:
    return dist.get_process_group_ranks(reducer.group)


def _cost_ns(reducer: Reducer, profile: Profile, bucket: Bucket) -> int:
    """What the all-reduce of a bucket costs by a profile of its ranks, in nanoseconds."""
    dtype = dtype_name(_sent_dtype(reducer, bucket).to_real())
    averages = reducer.communication.scaling(bucket.dtype) == "collective"
    table = profile.table(Kind(dtype, "avg" if averages else "sum"))
    return table.cost_ns(_sent_bytes(reducer, bucket))


def _stored_profile(place: Place) -> Profile | None:
    try:
        return look_up(place)
    except (OSError, ValueError):  # Whoever needs it says what is wrong with it.
        return None
