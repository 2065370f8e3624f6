"""Chooses buckets from measured costs: which gradients share one. Pure.

Gradients of one kind (one key and level, as nearly all are) get the best buckets that there are,
those of several kinds the best that are tried (:mod:`fusion_passes.plan.sharing`). Process groups
are counted as sharing one network.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import fx

from fusion_passes.config import ScalingOption
from fusion_passes.plan.again import ChosenFrom
from fusion_passes.plan.buckets import PredictedTimes
from fusion_passes.plan.caps import BucketCaps, measured_hold_bytes, most_kept_bytes
from fusion_passes.plan.queue import Queue, Run
from fusion_passes.plan.scaling import choose_scaling
from fusion_passes.plan.sharing import Runs, Slot, best_of, last_end, times_of
from fusion_passes.profile.records import Kind, Profile
from fusion_passes.profile.tables import NOTHING_TAKEN, Taken
from fusion_passes.reductions.find import GradientReduction, dtype_name

Members = tuple[GradientReduction, ...]


@dataclass(frozen=True)
class Decision:
    """Why buckets were chosen so, by the profile and the ready times.

    Attributes:
        profile: its digest.
        place: where it was measured.
        compute_ns: when the last gradient is ready.
        end_ns: when the last collective ends.
        fixed_end_ns: when it would end with the buckets of a fixed cap, as ``"concat"`` makes them.
        uncapped_end_ns: when it would end without the user's caps; ``None`` if there are none.
        kinds: of gradients that share the network.
        taken: what an all-reduce takes from the compute beside it.
        steps: in how many steps ready times were measured; 0 where they are estimates.
    """

    profile: str
    place: str
    compute_ns: int
    end_ns: int
    fixed_end_ns: int
    uncapped_end_ns: int | None
    kinds: int
    taken: Taken
    steps: int

    def lines(self) -> tuple[str, ...]:
        """The decision for people."""
        exposed = self.end_ns - self.compute_ns
        how = f"were measured in {self.steps} steps" if self.steps else "are estimated from shapes"
        chosen = (
            f"chosen from profile {self.profile} ({self.place}) and from ready times that {how}: "
            f"the last gradient is ready at {_ms(self.compute_ns)}, the "
            f"last all-reduce ends {_ms(exposed)} later; in the buckets of 'concat', "
            f"{_ms(self.fixed_end_ns - self.compute_ns)} later"
        )
        if self.taken != NOTHING_TAKEN:
            chosen += f" (an all-reduce takes {self.taken} from the compute beside it)"
        said = [chosen]
        if self.uncapped_end_ns is not None:
            cost = self.end_ns - self.uncapped_end_ns
            said.append(
                f"your bucket cap costs {_ms(cost)} of that"
                if cost > 0
                else "your bucket cap costs nothing"
            )
        if self.kinds > 1:
            said.append(
                f"gradients of {self.kinds} kinds share the network: these are the best buckets "
                "that were tried, not the best that there are"
            )
        return tuple(said)


@dataclass(frozen=True)
class Given:
    """From what buckets are chosen.

    Attributes:
        reductions: in graph order; at least one.
        levels: by launch: reductions of different levels never share a bucket.
        ready_ns: when each gradient has been computed; never falling in the order of the graph.
        overwritten_at: index of the first node that overwrites a gradient.
        caps_of: the limits of a module's buckets, by its group name.
        profiles: what collectives cost, by a module's group name.
        scaling: what the user asks for, since a collective that averages may cost more.
        steps: in how many steps ready times were measured; 0 where they are estimates.
    """

    reductions: Sequence[GradientReduction]
    levels: Mapping[fx.Node, int]
    ready_ns: Mapping[GradientReduction, int]
    overwritten_at: Mapping[GradientReduction, float]
    caps_of: Callable[[str], BucketCaps]
    profiles: Mapping[str, Profile]
    scaling: ScalingOption
    steps: int = 0

    def kinds(self) -> list[Members]:
        """The reductions that may share buckets: of one key and level."""
        kinds: dict[tuple[object, int], list[GradientReduction]] = {}
        for reduction in self.reductions:
            kind = reduction.key, self.levels[reduction.start]
            kinds.setdefault(kind, []).append(reduction)
        return [tuple(members) for members in kinds.values()]

    def slot(self, members: Members) -> Slot:
        """What decides about the buckets of one kind."""
        key, owner = members[0].key, members[0].owner
        caps = self.caps_of(key.group_name)
        wide, narrow = key.dtype.itemsize, key.reduce_dtype.itemsize
        sizes = tuple(member.num_bytes // wide * narrow for member in members)
        operation = choose_scaling(key, owner, self.scaling, folds=False).reduce_op
        kind = Kind(dtype_name(key.reduce_dtype.to_real()), operation)
        table = self.profiles[key.group_name].table(kind)
        # Larger ones were not measured: where the network is slow, their cost is no line.
        most = min(most_kept_bytes(key.device.type), table.num_bytes[-1])
        queue = Queue(
            tuple(self.ready_ns[member] for member in members),
            sizes,
            tuple(self._earliest(members, sizes, caps, most)),
            None if caps.most_bytes is None else caps.most_bytes // wide * narrow,
            None if caps.first_most_bytes is None else caps.first_most_bytes // wide * narrow,
        )
        positions = tuple(member.position for member in members)
        return Slot(positions, queue, table, self._taken)

    @property
    def _taken(self) -> Taken:
        """The same for all, which share one network and one device."""
        return self.profiles[self.reductions[0].key.group_name].rates.taken

    def chosen_from(self, estimates: Sequence[int]) -> ChosenFrom:
        """What another measurement of ready times decides by.

        Args:
            estimates: for each node of the graph, when it has been computed.
        """
        kinds = self.kinds()
        return ChosenFrom(
            tuple(map(self.slot, kinds)),
            tuple(tuple(member.owner.number for member in members) for members in kinds),
            tuple(tuple(estimates[member.position] for member in members) for members in kinds),
        )

    def _earliest(
        self, members: Members, sizes: Sequence[int], caps: BucketCaps, most: float
    ) -> list[int]:
        """For each member, the first one that it may share a bucket with.

        Args:
            members: of one kind.
            sizes: what is sent of each, in bytes.
            caps: of their module.
            most: bytes of a bucket of several, as they are sent.
        """
        name = members[0].key.group_name
        total = sum(r.num_bytes for r in self.reductions if r.key.group_name == name)
        hold = measured_hold_bytes(caps, total)
        # What waits is counted in bytes of any kind that became ready.
        sums = accumulate((r.num_bytes for r in self.reductions), initial=0)
        became_ready = dict(zip(self.reductions, sums, strict=False))
        before = [became_ready[member] for member in members]
        overwritten = sorted(
            (self.overwritten_at[member], i)
            for i, member in enumerate(members)
            if self.overwritten_at[member] < math.inf
        )
        sent = [*accumulate(sizes, initial=0)]
        earliest: list[int] = []
        first = passed = 0
        for j, member in enumerate(members):
            first = max(first, bisect.bisect_right(before, before[j] - hold, 0, j + 1))
            first = max(first, bisect.bisect_left(sent, sent[j + 1] - most))
            while passed < len(overwritten) and overwritten[passed][0] < member.position:
                first = max(first, overwritten[passed][1] + 1)
                passed += 1
            earliest.append(min(first, j))
        return earliest


def choose_members(
    given: Given, fixed: Sequence[Members]
) -> tuple[list[tuple[Members, PredictedTimes]], Decision]:
    """Choose which gradients share a bucket.

    Args:
        given: from what.
        fixed: the buckets that fixed caps give.

    Returns:
        The members of each bucket and when it is sent, in no order, and the decision.
    """
    kinds = given.kinds()
    slots = [given.slot(members) for members in kinds]
    free = [replace(slot, queue=slot.queue.without_caps()) for slot in slots]
    is_capped = any(slot.queue != other.queue for slot, other in zip(slots, free, strict=True))
    filled = _as_runs(kinds, fixed)
    # A bucket that is filled up to a cap goes beyond it; where that is the user's, it must not.
    runs = best_of(slots, None if is_capped else filled)
    profile = given.profiles[given.reductions[0].key.group_name]
    decision = Decision(
        profile.digest(),
        str(profile.place),
        max(slot.queue.ready_ns[-1] for slot in slots),
        last_end(slots, runs),
        last_end(slots, filled),
        last_end(free, best_of(free, filled)) if is_capped else None,
        len(slots),
        profile.rates.taken,
        given.steps,
    )
    sent = {(n, begin): PredictedTimes(*times) for n, begin, *times in times_of(slots, runs)}
    chosen = [
        (members[run.begin : run.end], sent[number, run.begin])
        for number, (members, mine) in enumerate(zip(kinds, runs, strict=True))
        for run in mine
    ]
    return chosen, decision


def _as_runs(kinds: Sequence[Members], buckets: Sequence[Members]) -> Runs:
    place = {
        member: (number, index)
        for number, members in enumerate(kinds)
        for index, member in enumerate(members)
    }
    runs: Runs = [[] for _ in kinds]
    for bucket in buckets:
        number, begin = place[bucket[0]]
        runs[number].append(Run(begin, begin + len(bucket)))
    return [sorted(mine, key=lambda run: run.begin) for mine in runs]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
