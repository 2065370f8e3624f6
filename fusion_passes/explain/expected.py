"""When the network should have been busy with each bucket, by what a profile says that it costs.

With ``"auto"``, the plan says that before a step has run. In other modes it is known when a bucket
was launched, and a profile of the network that somebody has measured says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.naming import launched_buckets
from fusion_passes.ddp.priced import cost_ns
from fusion_passes.profile.files import look_up
from fusion_passes.profile.known import known_profile
from fusion_passes.profile.records import Place, Profile, Site
from fusion_passes.profile.site import site_of
from fusion_passes.reporting.timeline import RankSteps
from fusion_passes.torch_private.ddp import parameters_of

Times = tuple[dict[str, tuple[float, float]], ...]
"""As :attr:`fusion_passes.reporting.timeline.Timeline.predicted`."""

PLANNED: Final = "by the plan, from estimated or measured times of compute and the network's costs"
NO_PROFILE: Final = (
    "nothing, because nobody has measured this network: torchrun ... -m fusion_passes.profile does"
)
NOT_HERE: Final = "nothing here: rank 0 knows where all ranks are"


def this_site() -> Site:
    """Where this rank is, with the device of its first module."""
    parameters = [p for ddp in registry.modules()[:1] for p in parameters_of(ddp)]
    return site_of(parameters[0].device if parameters else torch.device("cpu"))


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
    modules = [ddp for ddp in registry.modules() if ddp.process_group.size() > 1]
    if not modules:
        return (), ""
    if any(rank not in sites for ddp in modules for rank in _ranks_of(ddp)):
        return (), NOT_HERE
    costs_ns: dict[str, int] = {}
    profiles: dict[str, Profile] = {}
    for ddp in modules:
        module = registry.module_of(ddp)
        place = Place.of(
            [sites[rank] for rank in _ranks_of(ddp)], module.backend, torch.__version__
        )
        profile = known_profile(ddp.process_group) or _kept(place)
        if profile is None:
            return (), NO_PROFILE
        profiles[profile.digest()] = profile
        for name, mode, sent in launched_buckets(module.group_name):
            costs_ns[name] = cost_ns(ddp, profile, sent, one_by_one=mode == "coalesced")
    launched = {name: item.launched_s for name, item in mine.bucket_times(costs_ns).items()}
    found: dict[str, tuple[float, float]] = {}
    free_s = 0.0
    for name in sorted(launched, key=launched.__getitem__):
        begin_s = max(free_s, launched[name])
        free_s = begin_s + costs_ns[name] / 1e9
        found[name] = begin_s, free_s
    used = ", ".join(f"{digest} ({item.place})" for digest, item in profiles.items())
    return (found,), f"from when buckets were launched, and from what they cost by profile {used}"


def _ranks_of(ddp: DistributedDataParallel) -> list[int]:
    return dist.get_process_group_ranks(ddp.process_group)


def _kept(place: Place) -> Profile | None:
    try:
        return look_up(place)
    except (OSError, ValueError):  # Whoever needs it says what is wrong with it.
        return None
