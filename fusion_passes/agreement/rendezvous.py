"""Where the ranks of a process group meet over its store, and what becomes of what they say.

A rank says which settings it has and what it would launch; the last one that comes compares them,
and leaves a verdict that all of them read.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from fusion_passes.agreement.comparing import compare_statements, texts_of
from fusion_passes.agreement.launches import LaunchList
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import ProcessGroup, group_timeout, resolve_process_group

ASKING_SECONDS: Final = 1.0
"""How long the store may take to answer while an error is handled: its host may be what failed."""

GRACE_SECONDS: Final = 1.5
"""How much longer than the group's timeout a rank waits for a store that does not answer. One of
files takes a second longer to say that nobody has come."""

CHANGING_SECONDS: Final = 2.0
"""How long a rank that has changed waits for others to; at most an eighth of the timeout."""

_T = TypeVar("_T")


class RanksDisagreeError(RuntimeError):
    """The ranks of a group cannot run the same collectives.

    Attributes:
        module: the DDP module's name for its group.
        collectives: what each rank was to run, as text.
        silent: ranks that have not said what they run, though others waited for that as long as
            the group allows. In ``collectives``, they run what they ran before, if anything.
        failure: which rank has failed before it could say, and how; empty if none has.
        settings: what each rank's flag and caps are, where they differ.
    """

    def __init__(
        self,
        module: str,
        collectives: Mapping[int, str],
        silent: Collection[int] = (),
        failure: str = "",
        text: str = "",
        settings: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(text or failure or f"{module}: {dict(collectives)}")
        self.module = module
        self.collectives = collectives
        self.silent = silent
        self.failure = failure
        self.settings = settings or {}


@dataclass
class Meeting:
    """Where the ranks of a group meet.

    Attributes:
        store: a connection of its own: a rank may wait on it for as long as the group's timeout,
            and others in its process use the group's.
    """

    rank: int
    world_size: int
    timeout: timedelta
    store: dist.Store


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
        _meetings[group] = Meeting(group.rank(), group.size(), group_timeout(group), store.clone())
    return _meetings[group]


@dataclass(frozen=True)
class Terms:
    """How the ranks meet.

    Attributes:
        module: the DDP module's name for its group.
        last: what all ranks have run there before, if anything.
        is_change: whether they may come to run something else instead; others need not.
        may_lack: whether a rank may lack gradients that others reduce, and send zeros for them.
    """

    module: str
    last: LaunchList | None
    is_change: bool
    may_lack: bool


def meet(meeting: Meeting, place: str, statement: str, terms: Terms) -> tuple[str, Any]:
    """Tell the other ranks what this one would launch, and wait for the verdict.

    Args:
        meeting: where they meet.
        place: under which key.
        statement: what this rank says: its settings and a :class:`LaunchList`, as JSON.
        terms: how.

    Returns:
        ``"run"`` and the text of the list to run; ``"differ"`` or ``"nothing"`` and what each rank
        has said, where they reduce other gradients; ``"left"`` where not all have changed.

    Raises:
        RanksDisagreeError: settings differ, a rank has failed, or some have not come.
    """
    timeout = meeting.timeout
    if terms.is_change:
        timeout = min(timedelta(seconds=CHANGING_SECONDS), timeout / 8)
    verdict, said = within(
        meeting.timeout.total_seconds() + GRACE_SECONDS,
        lambda: exchange(
            meeting,
            place,
            statement,
            timeout,
            may_leave=terms.is_change,
            compare=lambda said: compare_statements(said, terms.may_lack),
        ),
    )
    if verdict is None:
        raise _silence(meeting, said, terms)
    kind, value = json.loads(verdict)
    if kind == "failed":
        raise RanksDisagreeError(terms.module, texts_of(value["statements"]), **value["error"])
    if kind == "settings":
        settings = {int(rank): json.loads(text)[0] for rank, text in value.items()}
        raise RanksDisagreeError(terms.module, texts_of(value), settings=settings)
    return kind, value


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
    """
    store, verdict = meeting.store, f"{place}/verdict"
    mine = f"{place}/{meeting.rank}"
    is_back = store.check([mine])  # It has waited here before, in vain.
    store.set(mine, statement)
    if store.add(f"{place}/arrived", int(not is_back)) == meeting.world_size:
        said, _ = said_at(meeting, place)
        store.compare_set(verdict, "", compare(said))
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


def within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What ``ask`` returns or raises. The store's host may be stopped, and a request to it has no
    timeout of its own.

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
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the process group's store has not answered for {seconds:g} s")
    return results[0]


def asked(ask: Callable[[], _T]) -> _T | None:
    """What ``ask`` returns; ``None`` where the store does not answer, in time or at all."""
    try:
        return within(ASKING_SECONDS, ask)
    except (RuntimeError, TimeoutError, OSError):
        return None


def leave_word(meeting: Meeting, place: str, reason: str, texts: Mapping[int, str]) -> None:
    """As :meth:`fusion_passes.agreement.participant.Participant.leave_word`, at a place."""
    error = {"failure": f"rank {meeting.rank}: {reason}"} if reason else {}
    said = {rank: json.dumps(["", text]) for rank, text in texts.items()}
    verdict = json.dumps(["failed", {"error": error, "statements": said}])
    # The user's error goes on, whatever becomes of this.
    asked(lambda: meeting.store.compare_set(f"{place}/verdict", "", verdict))


def _silence(meeting: Meeting, said: Mapping[int, str], terms: Terms) -> RanksDisagreeError:
    silent = [rank for rank in range(meeting.world_size) if rank not in said]
    texts = texts_of(said)
    if terms.last is not None:
        texts |= dict.fromkeys(silent, terms.last.encode())
    return RanksDisagreeError(terms.module, texts, silent)
