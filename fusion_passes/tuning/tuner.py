"""The mode ``"auto"``: compares layouts in the first steps, and keeps the fastest in a file.

Graphs store pieces, which the reducer groups into buckets, so another layout of the pieces needs no
compile. All ranks change it between the same two steps, and choose by the times of the slowest one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import torch

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Layout, Piece, decode, encode, lay_out, plan_layout
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce, Wait
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.torch_private import process_groups
from fusion_passes.tuning.choice import DEFAULT, MOST_STEPS, TURN, Contest, candidates, piece_caps

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "FUSION_PASSES_PROFILE_DIR"
FORMAT: Final = 1  # Version of the file's format.
WARM_UP: Final = 4  # Steps before the first turn: they compile, and fill caches.
EACH_PIECE: Final = BucketCaps(0, 0)  # With these caps, each piece is a bucket.
COMPARE, LEAVE = -1, -2  # Rank 0 sends one of these if it has no layout.


def learn_layout(reducer: Reducer) -> None:
    """Fix the layout that an earlier run has kept for a new module, or have the first steps choose
    one. All ranks call this in the module's constructor."""
    kinds, group = reducer.parameters.kinds, reducer.module.group
    reasons = {
        "nothing is sent on one rank": group.size() == 1,
        "memory that NCCL has registered stays as it is": reducer.memory.registered is not None,
        "compiled autograd has one layout": reducer.module.config.backward_graph
        == "compiled_autograd",
    }
    for why in (why for why, holds in reasons.items() if holds):
        _say(reducer, f"buckets are filled up to caps: {why}")
        return
    device, path = next(iter(kinds.values())).device, _path_of(reducer)
    sent = [COMPARE] * (2 * len(kinds))
    if group.rank() == 0:
        try:
            sent = encode(_read(path, kinds)) if path.exists() else sent
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("%s is not used, and layouts are compared: %s", path, error)
        if sent[0] == COMPARE and any(other.tuner is not None for other in reducers.alive()):
            sent[0] = LEAVE
    tensor = torch.tensor(sent, dtype=torch.int64, device=device)
    process_groups.broadcast_first(group, tensor)
    sent = tensor.tolist()
    if sent[0] == LEAVE:
        _say(reducer, "buckets are filled up to caps: this run compares those of another module")
    elif sent[0] == COMPARE:
        reducer.assignment.piece_caps = piece_caps(reducer.assignment.caps)
        reducer.tuner = LayoutTuner(device, path)
        _say(reducer, f"after {WARM_UP} steps, at most {MOST_STEPS} compare buckets")
    else:  # A bucket has gradients of one kind, whatever is in the file.
        buckets = plan_layout(decode(sent), kinds, EACH_PIECE).buckets
        reducer.fix_layout(lay_out([[(n,) for n in b.numbers] for b in buckets], kinds))
        _say(reducer, f"buckets are those that an earlier run has kept ({path.name} of rank 0)")


def _path_of(reducer: Reducer) -> Path:
    """The file of a module. Its name depends on everything that a constructor knows of steps."""
    known, size, sent_as = (
        reducer.parameters,
        reducer.module.group.size(),
        reducer.module.config.reduce_dtype,
    )
    backend = process_groups.backend_name(
        reducer.module.group, next(iter(known.kinds.values())).device
    )
    kinds = [replace(kind, device=torch.device(kind.device.type)) for kind in known.kinds.values()]
    parameters = [(known.names[n], known.all[n].shape) for n in known.kinds]
    key = repr([parameters, kinds, size, backend, sent_as, reducer.assignment.caps])
    given, cache = (os.environ.get(name) for name in (DIRECTORY_VARIABLE, "XDG_CACHE_HOME"))
    home = os.path.expanduser("~/.cache")  # noqa: PTH111  Path.home() raises without a home.
    default = Path(cache or (tempfile.gettempdir() if home[0] == "~" else home), "fusion_passes")
    return Path(given or default, f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.layout.json")


def _read(path: Path, numbers: Iterable[int]) -> list[Piece]:
    """The parameters of each bucket in a file. Raise an error if they are not these numbers."""
    data = json.loads(path.read_text())
    buckets = [tuple(map(int, bucket)) for bucket in data["buckets"]]
    if data["format"] != FORMAT or sorted(n for b in buckets for n in b) != sorted(numbers):
        raise ValueError("it is of another format or module")
    return cast("list[Piece]", buckets)


def _say(reducer: Reducer, *sentences: str) -> None:
    reducer.record.decision = sentences
    log.info("%s: %s", reducer.module.label, "; ".join(sentences))


class LayoutTuner:
    """Compares layouts of a module. A step ends with an iteration, which all ranks count alike."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self._device, self._path = device, path
        self._steps, self._sent_as = 0, None
        self._layouts: dict[str, Layout] = {}
        self._contest = Contest(0)
        self._turns: Iterator[int] = iter(())

    def end_iteration(self, reducer: Reducer) -> None:
        """Handle the end of a backward, which may have ended an iteration. All ranks call this
        at the same place among their collectives."""
        if reducer.steps == self._steps:
            return
        kinds, assignment = reducer.parameters.kinds, reducer.assignment
        self._steps, sent_before, why = reducer.steps, self._sent_as, ""
        self._sent_as = getattr(reducer.queue.communication, "dtype", None)
        is_hooked = not isinstance(reducer.queue.communication, AllReduce)
        if is_hooked or (self._layouts and self._sent_as != sent_before):
            why = "a communication hook has been registered"
        elif self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            why = "a CUDA graph is captured"
        elif not self._layouts:
            self._layouts = candidates(assignment.pieces, kinds, assignment.caps)
            self._contest = Contest(len(self._layouts))
            self._turns = self._all_turns(reducer.module.group)
        index = None if why else next(self._turns, None)
        if index is None:
            self._end(reducer, why)
        else:  # Graphs that are compiled now store pieces.
            reducer.fix_layout([*self._layouts.values()][index])
            assignment.graph_layout = plan_layout(assignment.pieces, kinds, EACH_PIECE)

    def _all_turns(self, group: Any) -> Iterator[int]:
        """Yield the layout of each next step."""
        contest, others = self._contest, list(range(1, self._contest.count))
        yield from [DEFAULT] * (WARM_UP - 1)
        while others:
            ends: dict[int, list[Any]] = {index: [] for index in (DEFAULT, *others)}
            for index in [index for index in ends for _ in range(TURN)]:
                yield index
                ends[index].append(self._now())
            # An accelerator runs this step while the host waits for the last event.
            yield DEFAULT
            wait, times = self._send(group, [*ends.values()])
            yield DEFAULT
            wait()
            contest.laps.append(dict(zip(ends, map(median, times.tolist()), strict=True)))
            others = contest.next_lap()

    def _end(self, reducer: Reducer, why: str) -> None:
        """Fix the fastest layout, and write it to the file; or the default, if ``why`` says so."""
        contest, choice = self._contest, DEFAULT if why else self._contest.choice
        said = ["the default is kept: no other layout is faster beyond the spread"]
        if why:
            said = [f"buckets are filled up to caps: {why}"]
        elif choice:
            ratios = ", ".join(f"{ratio:.3f}" for ratio in contest.ratios(choice))
            said = [f"{[*self._layouts][choice]} is kept: steps take {ratios} of the default's"]
        for index, (name, layout) in enumerate(self._layouts.items() if contest.laps else ()):
            ms = 1e3 * median(lap[index] for lap in contest.laps if index in lap)
            said.append(f"{name}: {ms:.1f} ms a step, {len(layout.buckets)} buckets")
        _say(reducer, *said)
        reducer.fix_layout([*self._layouts.values(), reducer.assignment.layout][choice])
        reducer.tuner = None
        if why or reducer.module.group.rank():
            return
        buckets = [bucket.numbers for bucket in reducer.assignment.layout.buckets]
        try:  # Whole or not at all: other processes may read or write the file at the same time.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump({"format": FORMAT, "decision": said, "buckets": buckets}, file)
            Path(file.name).replace(self._path)
        except OSError as error:
            remedy = f"Set {DIRECTORY_VARIABLE} to a directory that can be written."
            log.warning("%s is not written, for the next run: %s. %s", self._path, error, remedy)

    def _now(self) -> Any:
        """The current time in seconds, or an event: an accelerator runs behind the host."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _send(self, group: Any, ends: list[list[Any]]) -> tuple[Wait, torch.Tensor]:
        """Launch an all-reduce of the times of all turns, ``[turns, timed steps]``, which takes
        those of the slowest rank. Return the function that waits for it, and the times."""
        is_on_cpu, since = self._device.type == "cpu", operator.sub
        if not is_on_cpu:
            ends[-1][-1].synchronize()
            since = lambda end, begin: begin.elapsed_time(end) / 1e3  # noqa: E731
        mine = [[since(end, begin) for begin, end in pairwise(turn)] for turn in ends]
        times = torch.tensor(mine, dtype=torch.float64, pin_memory=not is_on_cpu)
        times = times.to(self._device, non_blocking=True)
        wait = process_groups.begin_all_reduce(group, times, torch.distributed.ReduceOp.MAX)
        if not is_on_cpu:
            wait()
            times, wait = times.to("cpu", non_blocking=True), self._now().synchronize
        return wait, times
