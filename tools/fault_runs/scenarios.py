"""What a scenario is. Nothing here imports torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Way = Literal["eager", "compiled", "concat", "coalesced"]
"""Eager DDP and stock ``torch.compile(ddp)``, which are the peers; or a mode of the flag."""

PEERS: tuple[Way, ...] = ("eager", "compiled")
MODES: tuple[Way, ...] = ("concat", "coalesced")

Action = Literal["kill", "stop", "raise", "skip"]

Point = Literal["step", "forward", "forward-op", "hook", "backward", "compile", "compile-backward"]
"""Where a training can meet its fault: see :mod:`fault_runs.training`."""

Unprepared = Callable[[Path], "Callable[[], None] | None"]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank.

    Attributes:
        action: kill -9, SIGSTOP, an exception of the user's, or a step that is left out.
        rank: which, or ``None`` for all.
        point: where in the training.
        step: when.
        continue_s: after how many seconds a stopped rank goes on; never if ``None``.
    """

    action: Action
    rank: int | None
    point: Point
    step: int = 3
    continue_s: float | None = None

    def hits(self, rank: int, point: str, step: int) -> bool:
        return (self.rank is None or self.rank == rank) and (self.point, self.step) == (point, step)


@dataclass(frozen=True)
class Scenario:
    """A program, and what becomes of it.

    Attributes:
        name: by which it is selected.
        program: ``module:function``, called with a :class:`fault_runs.rank.Run` on each rank.
        options: what the program reads from its run.
        fault: what is injected by the program.
        ranks: how many processes.
        group_timeout_s: of the process group.
        limit_s: from the fault (or the start, where there is none) until a rank counts as hung.
        slack_s: how much later than the latest peer an error may come.
        environment: of all ranks.
        rank_environment: of single ones.
        prepare: is given the directory of Inductor's cache, filled by a run without a fault; may
            return what undoes it. Raises :class:`CannotPrepareError` where it is not permitted.
        warm: whether the cache is filled before.
        trainings: how many run at the same time, on one cache.
        repeats: how often it is run.
        launcher: ``"torchrun"`` has options of its own, and is sent SIGINT at ``interrupt_step``.
        launcher_options: for torchrun.
        interrupt_step: at which step of any rank.
        must_end_right: whether an error is one however the peers end.
        peers: what it is compared with.
        quick: whether it is in the short selection.
    """

    name: str
    program: str = "fault_runs.training:train"
    options: Mapping[str, object] = field(default_factory=dict)
    fault: Fault | None = None
    ranks: int = 2
    group_timeout_s: float = 10.0
    limit_s: float = 60.0
    slack_s: float = 2.0
    environment: Mapping[str, str] = field(default_factory=dict)
    rank_environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    prepare: Unprepared | None = None
    warm: bool = True
    trainings: int = 1
    repeats: int = 1
    launcher: Literal["python", "torchrun"] = "python"
    launcher_options: tuple[str, ...] = ()
    interrupt_step: int | None = None
    must_end_right: bool = False
    peers: Sequence[Way] = PEERS
    quick: bool = False


class CannotPrepareError(RuntimeError):
    """The machine does not permit what a scenario needs; its text says why."""


def select(
    scenarios: Sequence[Scenario], patterns: Sequence[str], *, quick: bool
) -> list[Scenario]:
    """The scenarios that one of the patterns matches, in their order.

    Raises:
        ValueError: a pattern matches none.
    """
    names = [scenario.name for scenario in scenarios]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"{pattern!r} matches none of the {len(names)} scenarios; see --list")
    return [
        scenario
        for scenario in scenarios
        if (not patterns or any(fnmatch.fnmatch(scenario.name, p) for p in patterns))
        and (scenario.quick or not quick)
    ]
