"""All ranks of a process group know the same: rank 0's text, or what they measure together. All of
it is collectives of the group, which each rank must call at the same point."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

import torch

from fusion_passes.profile.files import path_of, store
from fusion_passes.profile.measure import SECONDS, Ranks, measure
from fusion_passes.profile.records import Kind, Place, Profile, Site
from fusion_passes.profile.site import site_of
from fusion_passes.torch_private.groups import backend_name, group_timeout
from fusion_passes.torch_private.process_groups import all_gather, broadcast_first

WAIT_SECONDS: Final = 60.0
"""How long ranks wait for each other while they measure, at most; the group's timeout, if that is
shorter."""


@dataclass(frozen=True)
class Where:
    """Where ranks measure.

    Attributes:
        group: their process group.
        device: on which the gradients are.
    """

    group: Any
    device: torch.device

    @property
    def backend(self) -> str:
        """Of the group, for the device."""
        return backend_name(self.group, self.device)

    @property
    def ranks(self) -> Ranks:
        """The ranks, for measuring."""
        timeout = min(group_timeout(self.group), timedelta(seconds=WAIT_SECONDS))
        return Ranks(self.group, self.device, timeout)


def agree_on_place(where: Where) -> Place:
    """The place of all ranks: an all-gather.

    Raises:
        RuntimeError: on every rank: they differ in what no profile can hold for.
    """
    mine = {
        "site": asdict(site_of(where.device)),
        "same": {"backend": where.backend, "torch": torch.__version__},
    }
    said = [json.loads(text) for text in gather_texts(where, json.dumps(mine))]
    same = said[0]["same"]
    for rank, item in enumerate(said):
        for name, value in item["same"].items():
            if value != same[name]:
                differ = f"{name} is {same[name]!r} on rank 0, and {value!r} on rank {rank}"
                raise RuntimeError(
                    "torch._inductor.config.ddp_fusion = 'auto' needs one profile for all ranks, "
                    f"but they differ: {differ}. Give all ranks the same, or set a fixed "
                    "ddp_fusion = 'concat'."
                )
    return Place.of([Site(**item["site"]) for item in said], **same)


def measure_together(
    where: Where, place: Place, kinds: Sequence[Kind], seconds: float = SECONDS
) -> Profile:
    """Measure a profile, of which rank 0 says so.

    Args:
        where: the ranks are.
        place: of all of them.
        kinds: of collectives, in the same order on all ranks; at least one.
        seconds: for all tables together.

    Raises:
        RuntimeError: a rank has failed, or has not come in time.
    """
    says = where.group.rank() == 0
    if says:
        line = f"fusion_passes: measuring all-reduces of {place}, for at most about {seconds:g} s"
        print(line, file=sys.stderr, flush=True)
    try:
        profile = measure(where.ranks, place, kinds, seconds)
    except RuntimeError as error:
        raise RuntimeError(
            "torch._inductor.config.ddp_fusion = 'auto' measures the network while "
            f"DistributedDataParallel is constructed, and that has failed on rank "
            f"{where.group.rank()}: {error}. If it is a collective that has failed, another rank "
            "has probably died or stalled: look at its output."
        ) from error
    if says:
        for kind, table in profile.tables:
            print(f"fusion_passes: {kind}: {table.fit()}", file=sys.stderr, flush=True)
    return profile


def keep(where: Where, profile: Profile) -> None:
    """Keep a profile, on rank 0."""
    if where.group.rank() == 0 and store(profile) is not None:
        path = path_of(profile.place)
        print(f"fusion_passes: kept in {path}", file=sys.stderr, flush=True)


def gather_texts(where: Where, text: str) -> list[str]:
    """The texts of all ranks: two all-gathers."""
    mine = text.encode()
    sizes = all_gather(where.group, torch.tensor([len(mine)], device=where.device)).tolist()
    longest = max(sizes)
    padded = torch.tensor([*mine.ljust(longest)], dtype=torch.uint8, device=where.device)
    gathered = bytes(all_gather(where.group, padded).tolist())
    return [
        gathered[rank * longest : rank * longest + size].decode() for rank, size in enumerate(sizes)
    ]


def first_text(where: Where, text: str) -> str:
    """The text of rank 0: two broadcasts.

    Args:
        where: the ranks are.
        text: of this rank; only that of rank 0 is looked at.
    """
    mine = text.encode() if where.group.rank() == 0 else b""
    size = torch.tensor([len(mine)], device=where.device)
    broadcast_first(where.group, size)
    padded = mine.ljust(int(size.item()))
    sent = torch.tensor([*padded], dtype=torch.uint8, device=where.device)
    broadcast_first(where.group, sent)
    return bytes(sent.tolist()).decode()
