"""All ranks of a process group run the same collectives, or all of them get an error.

A graph is compiled on each rank from what that rank's backward has traced. If a parameter has a
gradient on one rank and none on another, their graphs reduce different buckets: the collectives
would not match, and the best that could happen is a timeout without a reason. So a graph says, just
before its first launch, which collectives it is about to run. Nothing is sent while that is what
the same module ran the last time; a change is put to the other ranks over the group's store.

Hooks that run eagerly have their collectives behind them before anybody knows which they are: they
are compared at the end of the backward, before the gradients are used.

A rank whose backward has not changed asks nobody, and would be stuck in its first collective while
the others wait for it. It finds out when that fails (see :func:`waiting_ranks`).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from fusion_passes.torch_private import ProcessGroup, group_timeout, resolve_process_group

_VERDICT: Final = "verdict"
_SAME: Final = "same"
_FAILED: Final = "failed"


class RanksDisagreeError(RuntimeError):
    """The ranks of a group are about to run different collectives.

    Attributes:
        module: the DDP module's name for its group.
        collectives: what each rank was to run.
        silent: ranks that have not told what they run, though others waited for that as long as
            the group allows. In ``collectives``, they run what they ran before, if anything.
        failure: which rank has failed before it could tell, and how; empty if none has.
    """

    def __init__(
        self,
        module: str,
        collectives: Mapping[int, str],
        silent: Collection[int] = (),
        failure: str = "",
        text: str = "",
    ) -> None:
        super().__init__(text or failure or f"{module}: {dict(collectives)}")
        self.module = module
        self.collectives = collectives
        self.silent = silent
        self.failure = failure


@dataclass
class _History:
    """What one module has run on one process group, in compiled graphs or in eager hooks.

    Attributes:
        calls: how many graphs of the module have come to their first launch.
        agreed: the collectives of the last one.
        failures: how often a rank has failed before it could come to one, as far as this rank has
            told or been told. Such a call does not count: all can try again.
    """

    calls: int = 0
    agreed: str | None = None
    failures: int = 0


@dataclass
class _Meeting:
    """Where the ranks of a group meet.

    Attributes:
        store: a connection of its own: a rank may wait on it for as long as the group's timeout,
            and others in its process use the group's.
    """

    rank: int
    world_size: int
    timeout: timedelta
    store: dist.Store
    histories: dict[tuple[str, str], _History] = field(default_factory=dict)


_meetings: Final[weakref.WeakKeyDictionary[ProcessGroup, _Meeting]] = weakref.WeakKeyDictionary()


_keys: Final[dict[str, str]] = {}


def meet_under(module: str, key: str) -> None:
    """Says under which key of its group's store a module meets its like on other ranks. Its own
    name need not be the same on all of them once it has moved to another group."""
    _keys[module] = key


def agree(module: str, collectives: str, where: str = "") -> None:
    """Returns once all ranks of the module's group are known to run the same collectives.

    Args:
        module: the DDP module's name for its group.
        collectives: which, in the order in which they are launched; any text that is the same on
            two ranks if and only if they match.
        where: they are compared with what ran last in the same place.

    Raises:
        RanksDisagreeError: they are not the same, or some ranks have not come to tell theirs
            within the group's timeout.
    """
    meeting = _meeting_of(module)
    if meeting is None:
        return
    history = meeting.histories.setdefault((module, where), _History())
    history.calls += 1
    if history.agreed != collectives:
        _meet(meeting, module, history, collectives, where)
        history.agreed = collectives


def _meeting_of(module: str) -> _Meeting | None:
    """``None`` where there is nobody to meet."""
    group = resolve_process_group(module)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _meetings:
        store: Any = group.get_group_store()
        _meetings[group] = _Meeting(group.rank(), group.size(), group_timeout(group), store.clone())
    return _meetings[group]


def _met(module: str) -> _Meeting | None:
    """``None`` if the ranks have not met yet, or the module has outlived its group."""
    try:
        return _meetings.get(resolve_process_group(module))
    except RuntimeError:
        return None


def calls_of(module: str) -> int:
    """How many graphs of the module have come to their first launch on its group."""
    return runs_of(module).get("", (0, None))[0]


def runs_of(module: str) -> dict[str, tuple[int, str | None]]:
    """How often the module has come to agree on its group, and on what last, in each place."""
    meeting = _met(module)
    return {
        where: (history.calls, history.agreed)
        for (name, where), history in (meeting.histories.items() if meeting else ())
        if name == module
    }


def tell_failure(module: str, reason: str) -> None:
    """Tells the ranks that wait for this one to agree, or come to do so, that it has failed before
    it could. They get an error at once, and not when the group's timeout is over.

    Args:
        module: the DDP module's name for its group.
        reason: for people.
    """
    meeting = _meeting_of(module)
    if meeting is None:
        return
    history = meeting.histories.setdefault((module, ""), _History())
    place = _place(module, replace(history, calls=history.calls + 1))
    verdict = json.dumps({_FAILED: f"rank {meeting.rank}: {reason}"})
    meeting.store.compare_set(f"{place}/{_VERDICT}", "", verdict)
    history.failures += 1


def waiting_ranks(modules: Iterable[str]) -> RanksDisagreeError | None:
    """Why a collective of one of the modules may just have failed: other ranks were not in it, but
    waited for an agreement on others. ``None`` if they were not."""
    for module in modules:
        meeting = _met(module)
        if meeting is None:
            continue
        for (name, where), history in meeting.histories.items():
            if name != module or history.agreed is None:
                continue
            # Eager hooks come to tell behind their collectives: the others may be one call ahead.
            for calls in range(history.calls, history.calls + 1 + bool(where)):
                told = _told(meeting, _place(module, replace(history, calls=calls), where))
                if told and meeting.rank not in told:
                    return RanksDisagreeError(module, {meeting.rank: history.agreed, **told})
    return None


def _meet(meeting: _Meeting, module: str, history: _History, collectives: str, where: str) -> None:
    """Tells the other ranks, and waits until the last one that comes has compared them all."""
    store, place = meeting.store, _place(module, history, where)
    store.set(f"{place}/{meeting.rank}", collectives)
    verdict = f"{place}/{_VERDICT}"
    if store.add(f"{place}/arrived", 1) == meeting.world_size:
        told = _told(meeting, place)
        agreed = len(set(told.values())) == 1
        store.set(verdict, _SAME if agreed else json.dumps(told))
    try:
        store.wait([verdict], meeting.timeout)
    except RuntimeError as error:
        told = _told(meeting, place)
        silent = [rank for rank in range(meeting.world_size) if rank not in told]
        if history.agreed is not None:
            told |= dict.fromkeys(silent, history.agreed)
        raise RanksDisagreeError(module, told, silent) from error
    answer = store.get(verdict).decode()
    if answer == _SAME:
        return
    told = json.loads(answer)
    failure = told.pop(_FAILED, "")
    if failure:
        history.calls -= 1
        history.failures += 1
    raise RanksDisagreeError(
        module, {int(rank): text for rank, text in told.items()}, failure=failure
    )


def _place(module: str, history: _History, where: str = "") -> str:
    key = _keys.get(module, module)
    return f"ddp_fusion/{key}{where}/{history.calls}/{history.failures}"


def _told(meeting: _Meeting, place: str) -> dict[int, str]:
    """What the ranks have told there, by rank."""
    keys = {rank: f"{place}/{rank}" for rank in range(meeting.world_size)}
    return {
        rank: meeting.store.get(key).decode()
        for rank, key in keys.items()
        if meeting.store.check([key])
    }


def number_runs(numbers: Iterable[int]) -> str:
    """``[5, 4, 3, 7, 8]`` as ``"5-3,7-8"``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first, last = runs[-1] if runs else (number, number + 2)
        step = number - last
        if abs(step) == 1 and (last - first) * step >= 0:
            runs[-1] = (first, number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers_in(runs: str) -> list[int]:
    """What :func:`number_runs` was given."""
    numbers: list[int] = []
    for run in runs.split(",") if runs else []:
        first, _, last = run.partition("-")
        start, end = int(first), int(last or first)
        step = 1 if end >= start else -1
        numbers.extend(range(start, end + step, step))
    return numbers
