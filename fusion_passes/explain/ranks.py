"""Brings what all ranks have recorded to rank 0, and their clocks together.

All of it goes over the store of the default process group, so that no collective is added to those
of the training.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import zlib
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from fusion_passes.reporting.timeline import RankSteps, rank_from_json
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.process_groups import world_group

log = logging.getLogger(__name__)

QUESTIONS: Final = 5
"""How often a rank asks rank 0 for the time; the fastest answer counts."""

PATIENCE_SECONDS: Final = 60.0
"""How long a rank waits for another one here."""

_numbers: Final = process_state.keep(
    [itertools.count()],
    "the number of the next gathering; a reset keeps it, since the store knows the others",
    Lifetime.PROCESS,
    reset=lambda _: None,
)


class Gathering:
    """One exchange of all ranks.

    Args:
        mine: what this rank has recorded, by its own clock.
    """

    def __init__(self, mine: RankSteps) -> None:
        self._mine = mine
        self._ranks = dist.get_world_size()
        self._place = f"fusion_passes/steps/{next(_numbers[0])}"
        self._store: Any = None

    def run(self) -> tuple[tuple[RankSteps, ...], tuple[int, ...]]:
        """On rank 0 the steps of all ranks by its clock, and the ranks that have not answered; on
        others their own, by the same clock."""
        if self._ranks == 1 or dist.get_backend() == "fake":
            return (replace(self._mine, start_s=0.0),), ()
        # A connection of its own: others in this process use the group's.
        self._store = world_group().get_group_store().clone()
        self._store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
        return self._gather() if self._mine.rank == 0 else self._send()

    def _gather(self) -> tuple[tuple[RankSteps, ...], tuple[int, ...]]:
        found, missing = [replace(self._mine, start_s=0.0)], []
        for rank in range(1, self._ranks):
            try:
                for number in range(QUESTIONS):
                    self._store.get(f"{self._place}/ask/{rank}/{number}")
                    self._store.set(f"{self._place}/answer/{rank}/{number}", str(time.time_ns()))
                packed = self._store.get(f"{self._place}/steps/{rank}")
                self._store.delete_key(f"{self._place}/steps/{rank}")  # It can be megabytes.
            except RuntimeError:  # Silent, or gone.
                missing.append(rank)
                continue
            theirs = rank_from_json(json.loads(zlib.decompress(packed)))
            found.append(replace(theirs, start_s=theirs.start_s - self._mine.start_s))
        if missing:
            log.warning("Ranks %s have not sent what they recorded.", missing)
        return tuple(found), tuple(missing)

    def _send(self) -> tuple[tuple[RankSteps, ...], tuple[int, ...]]:
        mine = self._mine
        try:
            ahead_s, error_s = self._compare_clocks()
            mine = replace(mine, start_s=mine.start_s - ahead_s, clock_error_s=error_s)
            text = json.dumps(asdict(mine)).encode()
            self._store.set(f"{self._place}/steps/{mine.rank}", zlib.compress(text))
        except RuntimeError as error:
            log.warning("Rank 0 does not take what this rank recorded: %s", error)
        return (replace(mine, start_s=0.0),), ()

    def _compare_clocks(self) -> tuple[float, float]:
        """How far this rank's clock is ahead of that of rank 0, and how wrong that can be: half of
        the time that the fastest answer took. Both in seconds."""
        best = (0.0, float("inf"))
        for number in range(QUESTIONS):
            asked = time.time_ns()
            self._store.set(f"{self._place}/ask/{self._mine.rank}/{number}", "")
            answer = int(self._store.get(f"{self._place}/answer/{self._mine.rank}/{number}"))
            heard = time.time_ns()
            error_s = (heard - asked) / 2e9
            if error_s < best[1]:
                best = ((asked + heard) / 2e9 - answer / 1e9, error_s)
        return best
