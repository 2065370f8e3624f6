"""Where the ranks of a module meet to speak of its plan: over their group's store, after a round
that has the same number on all of them, and outside of any backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from fusion_passes.agreement.exchange import (
    Meeting,
    RendezvousError,
    asked,
    exchange,
    meeting_of,
)
from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.rendezvous import RanksDisagreeError
from fusion_passes.ddp.replan_verdicts import LEFT

_FAILED: Final = "failed"


def meet(
    participant: Participant,
    label: str,
    name: str,
    statement: str,
    compare: Callable[[Mapping[int, str]], str],
) -> tuple[str, Any]:
    """Say something, wait until all ranks have, and return the verdict on it.

    Args:
        participant: the module.
        label: the module's for people.
        name: of what is spoken of.
        statement: what this rank says.
        compare: makes the verdict of what all have said: a kind and a value, as JSON.

    Raises:
        RanksDisagreeError: a rank has not come within the group's timeout, or has failed.
    """
    meeting = meeting_of(participant.module)
    assert meeting is not None, "a module that has nobody to meet is not watched"
    place, timeout = _place(participant, name), meeting.timeout
    verdict, said, why = None, dict[int, str](), ""
    try:
        verdict, said = exchange(
            meeting, place, statement, timeout, may_leave=False, compare=compare
        )
    except RendezvousError as error:
        why = f"that has failed on {error}"
    if verdict is None:
        silent = [] if why else [r for r in range(meeting.world_size) if r not in said]
        why = why or (
            f"ranks {silent} have not come within {timeout.total_seconds():g} s: they have "
            "died or stalled, so look at their output"
        )
        _say_failed(meeting, place, why)
        raise _error(participant, label, why, silent)
    kind, value = json.loads(verdict)
    if kind == _FAILED:
        raise _error(participant, label, value)
    return kind, value


def _error(
    participant: Participant, label: str, why: str, silent: list[int] | None = None
) -> RanksDisagreeError:
    return RanksDisagreeError(
        participant.module,
        {},
        silent or [],
        text=f"torch._inductor.config.ddp_fusion = 'auto': the ranks of {label} agree on what they "
        f"have measured in its steps, but {why}.",
    )


def decline(participant: Participant, because: str) -> None:
    """Leave word that this rank does not meet the others, and go on: they do not wait for it.
    Whatever they run now, they run on.

    Args:
        participant: the module.
        because: why, for people.
    """
    participant.meets_at = -1
    meeting = meeting_of(participant.module)
    if meeting is None:
        return
    place, said = _place(participant, "steps"), json.dumps([LEFT, because])

    def leave() -> None:
        store = meeting.store
        store.set(f"{place}/{meeting.rank}", said)
        if store.add(f"{place}/arrived", 1) == meeting.world_size:
            store.compare_set(f"{place}/verdict", "", json.dumps(["stop", because]))

    asked(leave)


def say_failed(participant: Participant, name: str, why: str) -> None:
    """Leave an error where the others wait, or will: they raise it at once.

    Args:
        participant: the module.
        name: as in :func:`meet`.
        why: for people.
    """
    meeting = meeting_of(participant.module)
    if meeting is not None:
        word = f"rank {meeting.rank} has ended with {why}"
        _say_failed(meeting, _place(participant, name), word)


def _say_failed(meeting: Meeting, place: str, why: str) -> None:
    word = json.dumps([_FAILED, why])
    asked(lambda: meeting.store.compare_set(f"{place}/verdict", "", word))


def _place(participant: Participant, name: str) -> str:
    numbers = f"{participant.rounds}/{participant.failures}"
    return f"ddp_fusion/{participant.key}/plan/{numbers}/{name}"
