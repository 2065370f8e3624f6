"""Mode ``"auto"``: a module's buckets are planned, when it is constructed, from what an earlier run
has measured; the first run fills caps and measures.

Rank 0 reads and writes the files, and plans. What it has found and planned goes to all ranks by a
broadcast each, whatever files the others have.
"""

from __future__ import annotations

import functools
import logging
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed as dist

from fusion_passes.graph.text import dtype_name
from fusion_passes.layout.layout import lay_out
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.tuning.files import keep, look_up, path_of, ready_path
from fusion_passes.tuning.measure import Ranks, agree_on_place, measure, of_first_rank
from fusion_passes.tuning.ready_clock import MEASURED_ROUNDS, SKIPPED_ROUNDS, ReadyClock
from fusion_passes.tuning.records import Place, Profile, ReadyTimes, parameters_key
from fusion_passes.tuning.timetable import plan_timetable
from fusion_passes.warnings import warn_once

log = logging.getLogger(__name__)

PIECES: Final = 8
"""Into how many pieces a graph cuts a bucket whose ready times are measured: all gradients of a
piece are marked ready with its last one."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Kept:
    """What rank 0 has found.

    Attributes:
        profile: of the place; ``None`` where there is none that can be used.
        times: of the module; ``None`` likewise.
        path: of the file that has these times, or is to have them.
        said: why something cannot be used.
    """

    profile: Profile | None
    times: ReadyTimes | None
    path: str
    said: tuple[str, ...] = ()


def learn_layout(reducer: Reducer) -> None:
    """Plan a module's buckets from what is kept, or have its ready times measured.

    All ranks must call this for the same module, before its first backward.

    Raises:
        RuntimeError: a rank has failed or not come in time, or they differ in what no profile can
            hold for.
    """
    kinds, communication = reducer.parameters.kinds.values(), reducer.queue.communication
    assert isinstance(communication, AllReduce), "a hook comes after the constructor"
    in_buckets = {(k.dtype, k.device, k.is_delayed) for k in kinds if not k.is_sparse}
    if reducer.group.size() == 1 or not in_buckets:
        _say(reducer, "nothing is sent in buckets, so they are filled up to caps")
        return
    (dtype, device, _), *others = in_buckets
    if others:
        several = "it has gradients of several dtypes or devices, or delayed ones"
        _say(reducer, f"{several}: buckets are filled up to caps")
        warn_once(
            f"auto {reducer.label}",
            f"ddp_fusion = 'auto' fills the buckets of {reducer.label} up to caps, as 'concat' "
            f"does: {several}, and plans buckets of one kind. Set ddp_fusion = 'concat', or train "
            "all parameters in one dtype, without delay_all_reduce_named_params.",
        )
        return
    sent, averages = communication.sent_dtype(dtype), communication.averages(dtype)
    ranks = Ranks.of(reducer.group, device)
    place = agree_on_place(ranks, f"{'avg' if averages else 'sum'} of {dtype_name(sent)}")
    kept = of_first_rank(ranks, _find(reducer, place) if ranks.is_first else None)
    assert kept is not None, "rank 0 has looked"
    for sentence in kept.said:
        log.warning("%s: %s", reducer.label, sentence)
    reducer.record.decision = kept.said
    profile = kept.profile
    if profile is None:
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        profile, path = measure(ranks, place, sent, operation), path_of(place)
        if ranks.is_first and keep(path, profile.to_json(), "The profile"):
            print(f"fusion_passes: kept in {path}", file=sys.stderr, flush=True)
    if kept.times is None:
        _measure(reducer, ranks, kept.path)
    else:
        _plan(reducer, ranks, profile, kept.times, sent.itemsize, kept.path)


# --- What is kept --------------------------------------------------------------------------------


def _find(reducer: Reducer, place: Place) -> Kept:
    """What this rank has kept."""
    known = reducer.parameters
    key = parameters_key(
        [
            (n, known.names[n], tuple(known.all[n].shape), dtype_name(known.all[n].dtype))
            for n in reducer.parameters.numbers
        ]
    )
    path = ready_path(place, key)
    said: list[str] = []

    def read(file: Path, read_it: Callable[[], _T]) -> _T | None:
        try:
            return read_it()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            said.append(f"{file} cannot be used, and is measured anew: {error}")
            return None

    profile = read(path_of(place), lambda: look_up(place))
    times = read(path, lambda: _times_of(path, reducer))
    return Kept(profile, times, str(path), tuple(said))


def _times_of(path: Path, reducer: Reducer) -> ReadyTimes:
    times = ReadyTimes.from_json(path.read_text())
    if not set(times.numbers) <= set(reducer.parameters.numbers):
        raise ValueError("it is one of other parameters")
    return times


# --- With kept times -----------------------------------------------------------------------------


def _plan(
    reducer: Reducer, ranks: Ranks, profile: Profile, times: ReadyTimes, itemsize: int, path: str
) -> None:
    """Give a reducer the layout that rank 0 plans, before its first backward."""
    kinds = reducer.parameters.kinds
    planned = of_first_rank(
        ranks,
        plan_timetable(times, kinds, itemsize, profile.table, reducer.assignment.caps)
        if ranks.is_first
        else None,
    )
    assert planned is not None, "rank 0 has planned"
    reducer.fix_layout(lay_out([[(n,) for n in numbers] for numbers in planned.buckets], kinds))
    reducer.record.predicted = planned.sent_ns
    source = (
        f"buckets are planned from the profile of {profile.place}, and from ready times of "
        f"{times.rounds} steps, measured {times.measured} ({path} of rank 0)"
    )
    _say(reducer, source, str(planned))


# --- Without -------------------------------------------------------------------------------------


def _measure(reducer: Reducer, ranks: Ranks, path: str) -> None:
    """Have a reducer measure what the next run plans from."""
    first, last = SKIPPED_ROUNDS + 1, SKIPPED_ROUNDS + MEASURED_ROUNDS
    _say(
        reducer,
        "first run: no ready times are kept of this module here, so buckets are filled up to caps, "
        f"and steps {first} to {last} measure, in which nothing is sent before all gradients are "
        f"there; the next run plans from {path} of rank 0",
    )
    caps = reducer.assignment.caps
    size = max(caps.cap_bytes // PIECES, 1)
    reducer.assignment.piece_caps = replace(caps, first_bytes=size, cap_bytes=size, listed_bytes=())
    ended = functools.partial(_keep, weakref.ref(reducer), Path(path))
    reducer.clock = ReadyClock(ranks.group, ranks.device, [*reducer.parameters.numbers], ended)


def _keep(ref: weakref.ref[Reducer], path: Path, ready_ns: Mapping[int, int]) -> None:
    reducer = ref()
    assert reducer is not None, "its round has ended"
    if not ready_ns:
        _say(reducer, "no step was measured: the next run measures again")
        return
    measured = f"{time.strftime('%Y-%m-%d %H:%M')} on {socket.gethostname()}"
    times = ReadyTimes(MEASURED_ROUNDS, (*ready_ns,), (*ready_ns.values(),), measured)
    if reducer.group.rank() == 0 and not keep(path, times.to_json(), "Ready times"):
        _say(reducer, f"ready times were measured, but cannot be kept in {path.parent}")
        return
    _say(reducer, f"ready times were measured in {times.rounds} steps; rank 0 keeps them")


def _say(reducer: Reducer, *sentences: str) -> None:
    reducer.record.decision += sentences
    for sentence in sentences:
        log.info("%s: %s", reducer.label, sentence)
