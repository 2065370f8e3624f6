"""All ranks of a process group get the same profile: one that a rank has kept, or one that they
measure together.

They meet over the group's store, so that it does not matter whose file is missing. Each says where
it is and what it needs; then each says which profile it has found, and that of the lowest rank
counts. Only where none has one that is enough do they measure.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch

from fusion_passes.agreement.exchange import Meeting, RendezvousError, asked, exchange
from fusion_passes.profile.files import load, path_of, store
from fusion_passes.profile.measure import SECONDS, Ranks, measure
from fusion_passes.profile.records import Kind, Place, Profile
from fusion_passes.profile.site import site_of
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.profile.verdicts import (
    NOBODY,
    all_equal,
    first_text,
    joined,
    longest,
    lowest_with_any,
)
from fusion_passes.torch_private import ProcessGroup

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 60.0
"""How long ranks wait for each other, at most; the group's timeout, if that is shorter.
Constructing a module has brought them here together."""


@dataclass(frozen=True)
class Wanted:
    """What a rank wants to know.

    Attributes:
        backend: of the process group for the device.
        kinds: of collectives.
    """

    backend: str
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Where:
    """Where ranks measure.

    Attributes:
        group: their process group.
        device: on which the gradients are.
    """

    group: ProcessGroup
    device: torch.device

    def ranks(self, timeout: timedelta) -> Ranks:
        """The ranks, for measuring."""
        return Ranks(self.group, self.device, timeout)


def agree_on_profile(meeting: Meeting, group: Where, wanted: Wanted, key: str) -> Profile:
    """The profile of a process group; the same on all ranks. Each of them must call this, at the
    same point.

    Args:
        meeting: of the ranks.
        group: the same ranks, for measuring.
        wanted: by this rank.
        key: in the store, not used before; the same on all ranks.

    Raises:
        RuntimeError: a rank has not come in time, or has failed, or the ranks differ in what no
            profile can hold for: their backend or version of torch.
    """
    rendezvous = _Rendezvous(meeting, key)
    place, kinds = rendezvous.where(group.device, wanted)
    found = load(place)
    profile = rendezvous.kept(found, is_enough=found is not None and not found.missing(kinds))
    if profile is None or profile.missing(kinds):
        measured = _measured(rendezvous, group, place, kinds)
        profile = measured if profile is None else measured.with_tables_of(profile)
        rendezvous.compare_measured(profile)
    if profile != found:
        store(profile)
    return profile


def measure_profile(
    meeting: Meeting, group: Where, wanted: Wanted, key: str, seconds: float
) -> Profile:
    """As :func:`agree_on_profile`, but measured anew, whatever was kept.

    Args:
        meeting: of the ranks.
        group: the same ranks, for measuring.
        wanted: by this rank.
        key: in the store, not used before; the same on all ranks.
        seconds: for all tables together.
    """
    rendezvous = _Rendezvous(meeting, key)
    place, kinds = rendezvous.where(group.device, wanted)
    profile = _measured(rendezvous, group, place, kinds, seconds)
    rendezvous.compare_measured(profile)
    store(profile)
    return profile


def agree_on_steps(meeting: Meeting, found: MeasuredSteps | None, key: str) -> MeasuredSteps | None:
    """The measured steps of a module that the lowest rank has kept which has any; the same on all
    ranks. Each of them must call this, at the same point.

    Args:
        meeting: of the ranks.
        found: what this rank has kept.
        key: in the store, not used before; the same on all ranks.

    Raises:
        RuntimeError: a rank has not come in time.
    """
    text = found.to_json() if found is not None else ""
    agreed = _Rendezvous(meeting, key).exchange("steps", json.dumps(text), first_text)
    return MeasuredSteps.from_json(agreed) if agreed != NOBODY else None


def _measured(
    rendezvous: _Rendezvous,
    group: Where,
    place: Place,
    kinds: Sequence[Kind],
    seconds: float = SECONDS,
) -> Profile:
    says = rendezvous.meeting.rank == 0
    if says:
        line = f"fusion_passes: measuring all-reduces of {place}, for at most about {seconds:g} s"
        print(line, file=sys.stderr, flush=True)
    try:
        profile = measure(group.ranks(rendezvous.timeout), place, kinds, seconds)
    except RuntimeError as error:
        raise rendezvous.failed(error) from error
    if not says:
        return profile
    for kind, table in profile.tables:
        print(f"fusion_passes: {kind}: {table.fit()}", file=sys.stderr)
    print(f"fusion_passes: kept in {path_of(place)}", file=sys.stderr, flush=True)
    return profile


@dataclass
class _Rendezvous:
    """Where the ranks compare what they know, over the store."""

    meeting: Meeting
    key: str

    @property
    def timeout(self) -> timedelta:
        return min(self.meeting.timeout, timedelta(seconds=WAIT_SECONDS))

    def failed(self, error: RuntimeError) -> RuntimeError:
        """Leave word that measuring has failed here.

        Returns:
            An error for this rank, with the word that another one has left before.
        """
        verdict = f"{self.key}/measured/verdict"
        word = json.dumps(["failed", f"rank {self.meeting.rank}: {error}"])
        said = asked(lambda: self.meeting.store.compare_set(verdict, "", word).decode())
        return self._failure(said or word)

    def _failure(self, word: str) -> RuntimeError:
        return RuntimeError(
            "torch._inductor.config.ddp_fusion = 'auto' measures the network while "
            "DistributedDataParallel is constructed, and that has failed on "
            f"{json.loads(word)[1]}. If it is a collective that has failed, another rank has "
            "probably died or stalled: look at its output."
        )

    def where(self, device: torch.device, wanted: Wanted) -> tuple[Place, tuple[Kind, ...]]:
        """The place of all ranks, and all that any of them needs."""
        statement = {
            "site": asdict(site_of(device)),
            "same": {"backend": wanted.backend, "torch": torch.__version__},
            "kinds": [asdict(kind) for kind in wanted.kinds],
        }
        verdict = json.loads(self.exchange("where", json.dumps(statement), joined))
        if "differ" in verdict:
            raise RuntimeError(
                "torch._inductor.config.ddp_fusion = 'auto' needs one profile for all ranks, but "
                f"they differ: {verdict['differ']}. Give all ranks the same, or set a fixed "
                "ddp_fusion = 'concat'."
            )
        place = verdict["place"]
        return Place(**{**place, "hosts": tuple(place["hosts"])}), tuple(
            Kind(**kind) for kind in verdict["kinds"]
        )

    def kept(self, found: Profile | None, is_enough: bool) -> Profile | None:
        """The profile that a rank has found, which all take, one that is enough before others;
        ``None`` if none has any."""
        statement = [is_enough] if found is not None else []
        rank = int(self.exchange("kept", json.dumps(statement), lowest_with_any))
        if rank < 0:
            return None
        text = found.to_json() if found is not None and rank == self.meeting.rank else ""
        return Profile.from_json(json.loads(self.exchange("text", json.dumps(text), longest)))

    def compare_measured(self, profile: Profile) -> None:
        """Compare what the ranks have measured together."""
        verdict = self.exchange("measured", json.dumps(profile.digest()), all_equal)
        if verdict.startswith("["):
            raise self._failure(verdict)
        if verdict != "true":
            raise RuntimeError(
                "torch._inductor.config.ddp_fusion = 'auto': the ranks have measured one network "
                "together and got different numbers. This is an error of fusion_passes or of the "
                "backend's all-reduce: please report it, and set ddp_fusion = 'concat'."
            )

    def exchange(
        self, name: str, statement: str, compare: Callable[[Mapping[int, str]], str]
    ) -> str:
        """The verdict on what all ranks say.

        Raises:
            RuntimeError: a rank has not come in time.
        """
        timeout = self.timeout
        place = f"{self.key}/{name}"
        try:
            verdict, said = exchange(
                self.meeting, place, statement, timeout, may_leave=False, compare=compare
            )
        except RendezvousError as error:
            raise RuntimeError(
                "torch._inductor.config.ddp_fusion = 'auto': ranks agree on what the network costs "
                "while DistributedDataParallel is constructed, but that has failed on "
                f"{error}."
            ) from error.__cause__
        if verdict is None:
            silent = [rank for rank in range(self.meeting.world_size) if rank not in said]
            raise RuntimeError(
                "torch._inductor.config.ddp_fusion = 'auto': ranks agree on what the network costs "
                f"while DistributedDataParallel is constructed, but ranks {silent} have not come "
                f"within {timeout.total_seconds():g} s. They have died, stalled, or have another "
                "ddp_fusion: set it to 'auto' on all ranks."
            )
        return verdict
