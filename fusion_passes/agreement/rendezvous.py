"""What ranks say to each other before a launch, and what becomes of it: which settings each has,
and what it would launch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from fusion_passes.agreement.comparing import compare_statements, texts_of
from fusion_passes.agreement.exchange import Meeting, RendezvousError, asked, exchange

SHORT_SECONDS: Final = 2.0
"""How long a rank that has changed, or failed, waits for others to; at most an eighth of the
timeout."""


class RanksDisagreeError(RuntimeError):
    """The ranks of a group cannot run the same collectives.

    Attributes:
        module: the DDP module's name for its group.
        collectives: what each rank was to run, as text; of those that are known to this one.
        agreed: what all have run in earlier steps, as text, where this rank cannot, and does not
            know of the others; empty otherwise.
        silent: ranks that have not said what they run, though others waited for that as long as
            the group allows.
        failure: which rank has failed before it could say, and how; empty if none has.
        settings: what each rank's flag and caps are, where they differ.
        is_overtaken: whether collectives that are not DDP's lie between what ranks launch, so that
            one whose graphs differ cannot launch it by hand.
    """

    def __init__(
        self,
        module: str,
        collectives: Mapping[int, str],
        silent: Collection[int] = (),
        failure: str = "",
        text: str = "",
        settings: Mapping[int, str] | None = None,
        *,
        agreed: str = "",
        is_overtaken: bool = False,
    ) -> None:
        super().__init__(text or failure or f"{module}: {dict(collectives)}")
        self.module = module
        self.collectives = collectives
        self.agreed = agreed
        self.silent = silent
        self.failure = failure
        self.settings = settings or {}
        self.is_overtaken = is_overtaken


@dataclass(frozen=True)
class Terms:
    """How the ranks meet.

    Attributes:
        module: the DDP module's name for its group.
        is_change: whether they may come to run something else instead; others need not.
        may_lack: whether a rank may lack gradients that others reduce, and send zeros for them.
    """

    module: str
    is_change: bool
    may_lack: bool


def short_timeout(meeting: Meeting) -> timedelta:
    """How long to wait for what others need not do."""
    return min(timedelta(seconds=SHORT_SECONDS), meeting.timeout / 8)


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
    timeout = short_timeout(meeting) if terms.is_change else meeting.timeout
    try:
        verdict, said = exchange(
            meeting,
            place,
            statement,
            timeout,
            may_leave=terms.is_change,
            compare=lambda said: compare_statements(said, terms.may_lack),
        )
    except RendezvousError as error:
        raise RanksDisagreeError(terms.module, {}, failure=str(error)) from error.__cause__
    if verdict is None:
        silent = [rank for rank in range(meeting.world_size) if rank not in said]
        raise RanksDisagreeError(terms.module, texts_of(said), silent)
    kind, value = json.loads(verdict)
    if kind == "failed":
        texts = texts_of({**value["statements"], meeting.rank: statement})
        raise RanksDisagreeError(terms.module, texts, **value["error"])
    if kind == "settings":
        settings = {int(rank): json.loads(text)[0] for rank, text in value.items()}
        raise RanksDisagreeError(terms.module, texts_of(value), settings=settings)
    return kind, value


def leave_word(
    meeting: Meeting, place: str, reason: str, texts: Mapping[int, str], *, is_overtaken: bool
) -> None:
    """As :meth:`fusion_passes.agreement.participant.Participant.leave_word`, at a place."""
    error: dict[str, Any] = {"failure": f"rank {meeting.rank}: {reason}"} if reason else {}
    error |= {"is_overtaken": True} if is_overtaken else {}
    said = {rank: json.dumps(["", text]) for rank, text in texts.items()}
    verdict = json.dumps(["failed", {"error": error, "statements": said}])
    # The user's error goes on, whatever becomes of this.
    asked(lambda: meeting.store.compare_set(f"{place}/verdict", "", verdict))


def note_failed(meeting: Meeting, place: str) -> None:
    """Say that this rank's round has failed there, by itself or with another's."""
    asked(lambda: meeting.store.set(f"{place}/failed/{meeting.rank}", ""))


def who_goes_on(meeting: Meeting, place: str, timeout: timedelta) -> list[int] | None:
    """The ranks whose round has not failed there, within a timeout; ``None`` if the store does not
    answer."""
    keys = [f"{place}/failed/{rank}" for rank in range(meeting.world_size)]

    def look() -> list[int]:
        with contextlib.suppress(RuntimeError):
            if timeout:
                meeting.store.wait(keys, timeout)
        return [rank for rank, key in enumerate(keys) if not meeting.store.check([key])]

    return asked(look, timeout.total_seconds())
