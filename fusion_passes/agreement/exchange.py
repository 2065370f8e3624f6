"""Where the ranks of a process group meet over its store: each says something, and the last one
that comes leaves a verdict that all of them read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from fusion_passes.agreement.processes import Process, introduce, processes_here
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import ProcessGroup, resolve_process_group
from fusion_passes.torch_private.groups import group_timeout

ASKING_SECONDS: Final = 1.0
"""How long the store may take to answer while an error is handled: its host may be what failed."""

GRACE_SECONDS: Final = 1.5
"""How much longer than the group's timeout a rank waits for a store that does not answer. One of
files takes a second longer to say that nobody has come."""

LOOKING_SECONDS: Final = 0.5
"""How often a rank that waits looks whether others' processes have ended."""

ENDED: Final = "ended"
"""The kind of a verdict whose value says that a rank's process has ended."""

_T = TypeVar("_T")


class RendezvousError(RuntimeError):
    """The ranks cannot meet. The text says on what it has failed."""


@dataclass
class Meeting:
    """Where the ranks of a group meet.

    Attributes:
        store: a connection of its own: a rank may wait on it for as long as the group's timeout,
            and others in its process use the group's.
        free: the group's, on which nobody waits so long.
    """

    rank: int
    world_size: int
    timeout: timedelta
    store: dist.Store
    free: dist.Store


_meetings: Final = process_state.keep(
    weakref.WeakKeyDictionary[ProcessGroup, Meeting](),
    "connections to the stores of process groups",
    Lifetime.GROUP,
    reset=weakref.WeakKeyDictionary.clear,
)


def meeting_of(module: str) -> Meeting | None:
    """``None`` where there is nobody to meet."""
    try:
        group = resolve_process_group(module)
    except RuntimeError:  # The module has outlived its group.
        return None
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    if group not in _meetings:
        store: Any = group.get_group_store()
        introduce(store, group.rank(), os.getpid())
        _meetings[group] = Meeting(
            group.rank(), group.size(), group_timeout(group), store.clone(), store
        )
    return _meetings[group]


def exchange(
    meeting: Meeting,
    place: str,
    statement: str,
    timeout: timedelta,
    may_leave: bool,
    compare: Callable[[Mapping[int, str]], str],
) -> tuple[str | None, dict[int, str]]:
    """The verdict of the last rank that comes, ``None`` if some have not come; and what each one
    has said.

    Args:
        meeting: of the ranks.
        place: in the store, the same on all ranks.
        statement: what this rank says.
        timeout: for how long it waits.
        may_leave: whether it leaves word if it has waited in vain.
        compare: makes the verdict of what all have said.

    Raises:
        RendezvousError: the process of a rank that has yet to come has ended, or the store does not
            answer. Its cause is what the store's client has raised.
    """

    def ask() -> tuple[str | None, dict[int, str]]:
        _leave_statement(meeting, place, statement, compare)
        return _verdict_of(meeting, place, timeout, may_leave)

    longest = meeting.timeout if may_leave else timeout
    # One that leaves soon need not know why others do not come.
    meanwhile = None if may_leave else _Watch(meeting, place).look
    try:
        verdict, said = within(longest.total_seconds() + GRACE_SECONDS, ask, meanwhile)
    except (RuntimeError, TimeoutError, OSError) as error:
        raise RendezvousError(
            "the process group's store, which does not answer: the process that hosts it, rank 0's "
            "or torchrun's, has ended or stalled. Look at its output"
        ) from error
    if verdict is not None and verdict.startswith(f'["{ENDED}"'):
        raise RendezvousError(json.loads(verdict)[1])
    return verdict, said


def _leave_statement(
    meeting: Meeting, place: str, statement: str, compare: Callable[[Mapping[int, str]], str]
) -> None:
    """Say something; the last rank that does leaves the verdict."""
    store, mine = meeting.store, f"{place}/{meeting.rank}"
    is_back = store.check([mine])  # It has waited here before, in vain.
    store.set(mine, statement)
    if store.add(f"{place}/arrived", int(not is_back)) == meeting.world_size:
        said, _ = said_at(meeting, place)
        store.compare_set(f"{place}/verdict", "", compare(said))


def _verdict_of(
    meeting: Meeting, place: str, timeout: timedelta, may_leave: bool
) -> tuple[str | None, dict[int, str]]:
    """As :func:`exchange`, of what has been said."""
    store, verdict = meeting.store, f"{place}/verdict"
    try:
        store.wait([verdict], timeout)
    except RuntimeError:
        if not may_leave:
            return None, said_at(meeting, place)[0]
        # Whoever comes later learns that this one has left.
        return store.compare_set(verdict, "", json.dumps(["left", None])).decode(), {}
    answer = store.get(verdict).decode()
    if store.add(f"{place}/left", 1) == meeting.world_size:
        for name in ("arrived", "left", "verdict", *map(str, range(meeting.world_size))):
            with contextlib.suppress(RuntimeError):  # Not every store can delete.
                store.delete_key(f"{place}/{name}")
    return answer, {}


def said_at(meeting: Meeting, place: str) -> tuple[dict[int, str], Any]:
    """What the ranks have said there, by rank, and the verdict."""
    store = meeting.store
    keys = {rank: f"{place}/{rank}" for rank in range(meeting.world_size)}
    said = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    verdict = f"{place}/verdict"
    return said, json.loads(store.get(verdict)) if store.check([verdict]) else None


@dataclass
class _Watch:
    """Says to all who wait at a place that a rank which has yet to come never will."""

    meeting: Meeting
    place: str
    _processes: dict[int, Process] | None = None

    def look(self) -> None:
        if self._processes is None:
            self._processes = asked(lambda: processes_here(self.meeting.free)) or {}
        for rank, process in list(self._processes.items()):
            if process.has_ended():
                del self._processes[rank]
                asked(functools.partial(self._say, rank, process))

    def _say(self, rank: int, process: Process) -> None:
        word = json.dumps([ENDED, f"rank {rank}: its process ({process.pid}) has ended"])
        # What it has said before counts.
        if not self.meeting.free.check([f"{self.place}/{rank}"]):
            self.meeting.free.compare_set(f"{self.place}/verdict", "", word)


def within(
    seconds: float, ask: Callable[[], _T], meanwhile: Callable[[], None] | None = None
) -> _T:
    """What ``ask`` returns or raises. The store's host may be stopped, and a request to it has no
    timeout of its own.

    Args:
        seconds: how long it may take.
        ask: is called in a thread.
        meanwhile: is called now and then.

    Raises:
        TimeoutError: there was no answer.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(ask())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="fusion_passes store", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(left if meanwhile is None else min(left, LOOKING_SECONDS))
        if meanwhile is not None and thread.is_alive():
            meanwhile()
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the process group's store has not answered for {seconds:g} s")
    return results[0]


def asked(ask: Callable[[], _T], waits: float = 0.0) -> _T | None:
    """What ``ask`` returns; ``None`` where the store does not answer, in time or at all.

    Args:
        ask: is called in a thread.
        waits: for how many seconds it waits for other ranks.
    """
    try:
        return within(waits + ASKING_SECONDS, ask)
    except (RuntimeError, TimeoutError, OSError):
        return None
