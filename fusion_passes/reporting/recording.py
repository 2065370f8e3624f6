"""Records steps of an unchanged training loop with torch's profiler, and gathers the steps of all
ranks on rank 0."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import socket
import statistics
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fusion_passes.reducer.backward import reducers
from fusion_passes.reporting.modules import backward_counts, module_reports
from fusion_passes.reporting.spans import Event, RankTimeline, lane_of, timeline_of
from fusion_passes.reporting.timeline import RankSteps, Timeline
from fusion_passes.torch_private.profiling import (
    PREFIX,
    compile_seconds,
    is_profiling,
    recorded_events,
)

log = logging.getLogger(__name__)

ENDED: Final = "the script ended before its steps were recorded"
"""The reason why there is no timeline."""


class Recording:
    """Steps that are being recorded: first ``plain_steps`` that are only timed, then ``steps``
    under torch's profiler. The step in which the recording began, and the step in which the
    profiler starts, do not count.

    A step ends when a backward ends that has completed the gradients of a module. Every rank knows
    that at the same point of its program, and the training loop need not tell it.

    Attributes:
        timeline: timeline of all ranks on rank 0, of this rank on others; ``None`` until it is
            done.
        problem: reason why there is no timeline; empty if there is one, or none yet.
    """

    def __init__(self, steps: int, plain_steps: int, gather: bool) -> None:
        self.timeline: Timeline | None = None
        self.problem = ""
        self._wanted = steps
        self._plain_wanted = plain_steps
        self._gather = gather
        self._iterations = _iterations()
        self._last_ns = 0
        self._plain: list[tuple[float, bool]] = []
        self._compile_s = compile_seconds()
        self._ends: list[int] = []
        self._profiler: profile | None = None

    @property
    def is_done(self) -> bool:
        return self.timeline is not None or bool(self.problem)

    def after_backward(self) -> None:
        """Check whether a step has ended; if so, begin what comes next."""
        before, self._iterations = self._iterations, _iterations()
        if self._iterations <= before or self.is_done:  # Fewer if a module was freed.
            return
        if self._profiler is None and any(reducer.tuner for reducer in reducers.alive()):
            self._last_ns, self._plain = 0, []  # Buckets still change between steps.
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time_ns()
        compile_s = compile_seconds()
        if self._profiler is not None:
            self._ends.append(now)
            if len(self._ends) > self._wanted:
                self._finish(self._profiler)
        elif self._last_ns and len(self._plain) < self._plain_wanted:
            self._plain.append(((now - self._last_ns) / 1e9, compile_s > self._compile_s))
        if self._profiler is None and len(self._plain) >= self._plain_wanted:
            self._start()
        self._compile_s = compile_s
        self._last_ns = time.time_ns()

    def _start(self) -> None:
        if self.is_done:
            return
        if is_profiling():  # A second profiler would replace the first.
            self.abandon("another torch profiler is running; its trace names the buckets too")
            log.warning("No steps are recorded: %s", self.problem)
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profiler.start()
        # A process that ends under a profiler can end with a segmentation fault.
        atexit.register(self.abandon)

    def _finish(self, profiler: profile) -> None:
        profiler.stop()
        self._profiler = None
        atexit.unregister(self.abandon)
        backward_counts.after = None
        begin, ends = self._ends[0], self._ends[1:]
        whole = read_profile(profiler, begin, ends[-1])
        mine = RankSteps(
            dist.get_rank(),
            f"{socket.gethostname()}, process {os.getpid()}",
            begin / 1e9,
            0.0,
            tuple((end - begin) / 1e9 for end in ends),
            whole.spans,
        )
        # Ordered by rank; all times by the clock of rank 0.
        ranks, missing = _gather(mine) if self._gather else ((replace(mine, start_s=0.0),), ())
        # Every rank times the same number of steps, even if some compile in them: so all ranks
        # start the profiler in the same step.
        seconds = [seconds for seconds, has_compiled in self._plain if not has_compiled]
        plain = statistics.median(seconds) if seconds else 0.0
        buckets = [bucket for item in module_reports() for bucket in item.buckets]
        names = {bucket.name: bucket.parameters for bucket in buckets}
        self.timeline = Timeline(ranks, names, plain, missing)

    def abandon(self, problem: str = ENDED) -> None:
        """Stop recording, if the steps are not recorded yet."""
        if self.is_done:
            return
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        self.problem = problem
        backward_counts.after = None


def _iterations() -> int:
    """The number of times that a module's gradients have been completed."""
    return sum(reducer.steps for reducer in reducers.alive())


last_recording: Final = list[Recording]()
"""The recording that was begun last, if any."""


def record_steps(steps: int = 3, *, plain_steps: int = 3, gather: bool = True) -> Recording:
    """Record the next steps of this training, on all ranks, without a change to its loop.

    Call it on every rank, at the same place of the program. :func:`fusion_passes.report` then says
    when each bucket was on its way, and ``report().timeline`` can be drawn. The recording ends by
    itself. If it is not called, nothing is measured, and nothing costs any time.

    Args:
        steps: number of steps to record with torch's profiler.
        plain_steps: number of steps to time before that, without the profiler; their median leaves
            out steps in which torch compiles. The two times show what the profiler costs.
        gather: whether rank 0 gets the steps of all ranks, over the store of the default process
            group. Each rank waits for that: two minutes at most, if some rank is silent.

    Returns:
        The recording; its ``timeline`` is ``None`` until it has ended. If a recording is already
        under way, for example under ``python -m fusion_passes.explain``, that one is returned.

    Raises:
        ValueError: ``steps`` is less than 1, or ``plain_steps`` is negative.
    """
    for name, value, least in (("steps", steps, 1), ("plain_steps", plain_steps, 0)):
        if value < least:
            raise ValueError(
                f"{name} must be an integer of at least {least}, but is {value!r}. Pass {least} or "
                "more."
            )
    if last_recording and not last_recording[0].is_done:
        return last_recording[0]
    last_recording[:] = [Recording(steps, plain_steps, gather)]
    backward_counts.after = last_recording[0].after_backward
    return last_recording[0]


def read_profile(profiler: profile, begin_ns: int, end_ns: int) -> RankTimeline:
    """The timeline of the events that began between two times of ``time.time_ns()``."""
    cuda = torch.cuda.is_available()
    events: list[Event] = []
    for name, start, end, on_host in recorded_events(profiler):
        if begin_ns <= start < end_ns and _counts(name, on_host, cuda):
            # On a GPU, a launch range lasts as long as the kernels launched in it: the network.
            shown = name if on_host or not name.startswith(PREFIX) else name.removesuffix(" launch")
            events.append((shown, (start - begin_ns) / 1e9, (end - begin_ns) / 1e9))
    return timeline_of(events, (end_ns - begin_ns) / 1e9, host_computes=not cuda)


def _counts(name: str, on_host: bool, cuda: bool) -> bool:
    """Whether an event counts. On a GPU, its kernels say what is computed and sent, not the host's
    events."""
    if name.startswith(PREFIX):
        return on_host or name.endswith(" launch")
    return not cuda or on_host == (lane_of(name) in ("launch", "wait"))


# --- All ranks -----------------------------------------------------------------------------------

QUESTIONS: Final = 5
"""Number of times that a rank asks rank 0 for the time; the fastest answer counts."""

PATIENCE_SECONDS: Final = 60.0
"""Time that rank 0 waits for the others to ask, in seconds; they wait twice as long."""


def _gather(mine: RankSteps) -> tuple[tuple[RankSteps, ...], tuple[int, ...]]:
    """Gather the recorded steps of all ranks on rank 0, and convert them to one clock.

    Everything goes over the store of the default process group, so that the training has no
    additional collective.

    Returns:
        On rank 0, the steps of all ranks by its clock, and the ranks that have not answered; on
        other ranks, their own steps.
    """
    world = dist.group.WORLD
    assert world is not None, "its gradients were averaged"
    found, missing = {mine.rank: mine}, list[int]()
    if world.size() > 1 and dist.get_backend(world) != "fake":
        # A connection of its own: other code in this process uses the group's.
        store: Any = world.get_group_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=PATIENCE_SECONDS * (2 if mine.rank else 1)))
        # Each rank counts its gatherings in the store: all ranks have the same number.
        place = f"fusion_passes/steps/{store.add(f'fusion_passes/gathered/{mine.rank}', 1)}"
        if mine.rank > 0:
            _send(mine, store, place)
            return (replace(mine, start_s=0.0),), ()
        found |= _receive_all(world.size(), store, place)
        missing = [rank for rank in range(world.size()) if rank not in found]
    if missing:
        log.warning("Ranks %s did not send their recorded steps.", missing)
    ranks = (
        replace(item, start_s=item.start_s - mine.start_s) for _, item in sorted(found.items())
    )
    return tuple(ranks), tuple(missing)


def _receive_all(world_size: int, store: Any, place: str) -> dict[int, RankSteps]:
    """The recorded steps of the ranks that ask in time, by rank."""
    asks = {rank: f"{place}/ask/{rank}/0" for rank in range(1, world_size)}
    with contextlib.suppress(RuntimeError):  # Some rank is silent.
        store.wait([*asks.values()])
    found: dict[int, RankSteps] = {}
    for rank, ask in asks.items():
        with contextlib.suppress(RuntimeError):  # The rank is gone, or the store.
            if store.check([ask]):
                found[rank] = _receive(rank, store, place)
    return found


def _receive(rank: int, store: Any, place: str) -> RankSteps:
    """The recorded steps of a rank that asks; a ``RuntimeError`` if it has stopped asking."""
    for number in range(QUESTIONS):
        store.get(f"{place}/ask/{rank}/{number}")
        store.set(f"{place}/answer/{rank}/{number}", str(time.time_ns()))
    packed = store.get(f"{place}/steps/{rank}")
    store.delete_key(f"{place}/steps/{rank}")  # It can be megabytes.
    theirs: RankSteps = pickle.loads(zlib.decompress(packed))
    return theirs


def _send(mine: RankSteps, store: Any, place: str) -> None:
    """Send rank 0 the recorded steps of this rank, by the clock of rank 0. The error of that clock
    is at most half of the time that the fastest answer took."""
    ahead_s, error_s = 0.0, float("inf")
    try:
        for number in range(QUESTIONS):
            asked = time.time_ns()
            store.set(f"{place}/ask/{mine.rank}/{number}", "")
            answer = int(store.get(f"{place}/answer/{mine.rank}/{number}"))
            heard = time.time_ns()
            if (heard - asked) / 2e9 < error_s:
                error_s = (heard - asked) / 2e9
                ahead_s = (asked - answer + heard - answer) / 2e9
        shifted = replace(mine, start_s=mine.start_s - ahead_s, clock_error_s=error_s)
        store.set(f"{place}/steps/{mine.rank}", zlib.compress(pickle.dumps(shifted)))
    except RuntimeError as error:
        log.warning("Cannot send the recorded steps of this rank to rank 0: %s", error)
