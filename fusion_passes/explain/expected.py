"""When the network should have been busy with each bucket, by what a profile says that it costs.

With ``"auto"``, the plan says that before a step has run. In other modes it is known when a bucket
was launched, and a profile of the network that somebody has measured says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from fusion_passes.plan.layout import Bucket
from fusion_passes.profile.files import known_profiles, look_up
from fusion_passes.profile.records import Kind, Place, Profile, Site, site_of
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reductions.find import dtype_name
from fusion_passes.reporting.modules import (
    backend_of,
    buckets_of,
    mode_of,
    sent_bytes,
    sent_dtype,
)
from fusion_passes.reporting.timeline import RankSteps

Times = tuple[dict[str, tuple[float, float]], ...]
"""As :attr:`fusion_passes.reporting.timeline.Timeline.predicted`."""

PLANNED: Final = "by the plan, from estimated or measured times of compute and the network's costs"
NO_PROFILE: Final = (
    "nothing, because nobody has measured this network: torchrun ... -m fusion_passes.profile does"
)
NOT_HERE: Final = "nothing here: rank 0 knows where all ranks are"


def this_site() -> Site:
    """Where this rank is, with the device of its first module."""
    devices = (kind.device for r in reducers.alive() for kind in r.parameters.kinds.values())
    return site_of(next(devices, torch.device("cpu")))


def by_profile(mine: RankSteps, ranks: Sequence[RankSteps]) -> tuple[Times, str]:
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
        place = Place.of(here, backend_of(reducer), torch.__version__)
        profile = known_profiles.get(reducer.group) or _kept(place)
        if profile is None:
            return (), NO_PROFILE
        profiles[profile.digest()] = profile
        for bucket in buckets_of(reducer):
            # What a hook sends, and how many rows, nobody knows before.
            if mode_of(reducer) != "hook" and not bucket.is_sparse:
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
    dtype = dtype_name(sent_dtype(reducer, bucket).to_real())
    averages = reducer.communication.scaling(bucket.dtype) == "collective"
    table = profile.table(Kind(dtype, "avg" if averages else "sum"))
    return table.cost_ns(sent_bytes(reducer, bucket))


def _kept(place: Place) -> Profile | None:
    try:
        return look_up(place)
    except (OSError, ValueError):  # Whoever needs it says what is wrong with it.
        return None
