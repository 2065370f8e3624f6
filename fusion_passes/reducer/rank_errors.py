"""Errors that ranks have together: a rank that constructs no module under the flag, settings that
differ, which ranks compare when a module is constructed, and a rank that cannot finish a backward.

Such a rank leaves a note in the group's store, so that the others, whose collectives fail by their
timeout, can say why. Nothing is sent in a backward that goes well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from fusion_passes.torch_private.process_groups import all_gather, group_timeout

MEET_SECONDS: Final = 60.0
"""How long a rank waits for the others to construct a module under the flag; the group's timeout,
if that is shorter. The collectives of DDP's constructor have just ended on all ranks. What lies
between them and the wait takes a rank some seconds for the largest models, and a broadcast of
parameters over a slow network ends on its first rank some seconds before the last one."""

_ANSWER_SECONDS: Final = 10.0
"""How much longer than it was told to wait the store may take to answer."""

_NAMED_RANKS: Final = 8
"""How many missing ranks an error names, at most."""

_T = TypeVar("_T")


class RanksDisagreeError(RuntimeError):
    """The ranks of a module cannot run the same collectives. The text says why.

    Attributes:
        module: the DDP module, for people.
    """

    def __init__(self, module: str, text: str) -> None:
        super().__init__(text)
        self.module = module


class SettingsDifferError(RanksDisagreeError):
    """The ranks of a module have not been given the same settings. The text says which."""


@dataclass
class FailureNotes:
    """What the ranks of a module leave in the store when they cannot finish a backward."""

    group: Any
    label: str
    _left_in: int = -1
    _left: str = ""
    _is_silent: bool = False
    """Whether the store has not answered: its host may be what has failed. It is not asked again,
    so that an error comes no later than it must."""

    def leave(self, round_: int, text: str) -> None:
        """Note why this rank cannot finish a round, by its number, which is the same on all ranks;
        the first note of a round stays."""
        if self._left_in == round_ or self.group.size() == 1:
            return
        note = f"{self.group.rank()} {text[:500]}"
        self._left_in, self._left = round_, note
        self._ask(lambda store: store.compare_set(self._key(round_), "", note))

    def take_back(self, round_: int) -> None:
        """Remove this rank's note, if it has left one in this round, which it has ended after all:
        nobody may take it for why a later collective fails."""
        if self._left_in == round_:
            self._left_in, note = -1, self._left
            self._ask(lambda store: store.compare_set(self._key(round_), note, ""))

    def why_failed(self, round_: int, error: Exception) -> RanksDisagreeError | None:
        """What another rank has noted, where a collective of this one has failed."""
        if self.group.size() == 1 or not _may_be_a_collectives(error):
            return None
        key = self._key(round_)
        note = self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        if not note:
            return None
        rank, _, text = note.decode().partition(" ")
        if int(rank) == self.group.rank():
            return None
        return RanksDisagreeError(
            self.label,
            f"A collective of {self.label} under ddp_fusion has failed, since rank {rank} "
            f"cannot finish its backward: {text}",
        )

    def _ask(self, ask: Callable[[Any], _T]) -> _T | None:
        """What ``ask`` returns of the store; ``None`` if that does not answer within a second."""
        answer = None if self._is_silent else _ask_store(self.group, ask, 1.0)
        self._is_silent = answer is None
        return answer

    def _key(self, round_: int) -> str:
        return f"ddp_fusion/failure/{self.label}/{round_}"


def _may_be_a_collectives(error: Exception) -> bool:
    """Whether a collective has raised an error, as far as can be told: Gloo's errors have no class
    of their own. A user's own goes on as it is, whatever the other ranks do."""
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    return any(text in str(error) for text in ("gloo", "pair closure", "timed out", "Timed out"))


def _ask_store(group: Any, ask: Callable[[Any], _T], seconds: float) -> _T | None:
    """What ``ask`` returns of a group's store; ``None`` if the store does not answer in this time,
    or at all. It is asked in a thread: a request to it has no timeout of its own."""
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, OSError):
            answers.append(ask(group.get_group_store()))

    thread = threading.Thread(target=run, name="fusion_passes store", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# --- Construction --------------------------------------------------------------------------------


def meet_ranks(group: Any, label: str, number: int, *, is_in_step: bool) -> None:
    """Wait until all ranks of a group have come here, for its module of this number. A rank without
    the flag does not come, and a collective would wait for it until the group's timeout.

    Each rank sends a few requests to the group's store, however many ranks there are; if the store
    does not answer, nothing is known, and the next collective tells.

    Args:
        group: the module's.
        label: of the module, for people.
        number: of the module. It may be used again if this has failed.
        is_in_step: whether DDP's constructor has just run collectives, after which ranks come here
            within :data:`MEET_SECONDS`. Otherwise they may take the group's timeout.

    Raises:
        RanksDisagreeError: it names ranks that have not come.
    """
    if group.size() == 1:
        return
    place, rank = f"ddp_fusion/constructed/{number}", group.rank()
    timeout = group_timeout(group)
    if is_in_step:
        timeout = min(timeout, timedelta(seconds=MEET_SECONDS))

    def meet(store: Any) -> list[int]:
        # Each rank appends its number when it comes, and once more when it gives up.
        store.append(f"{place}/ranks", f"{rank} ")
        if store.add(f"{place}/count", 1) == group.size():
            store.set(f"{place}/all", "")
        with contextlib.suppress(RuntimeError):  # A DistStoreError, or with a FileStore its base.
            store.wait([f"{place}/all"], timeout)
            return []
        if store.add(f"{place}/count", -1) == group.size() - 1:
            return []  # The last one has come just now.
        store.append(f"{place}/ranks", f"{rank} ")
        times = Counter(store.get(f"{place}/ranks").decode().split())
        waiting_for = [r for r in range(group.size()) if times[str(r)] % 2 == 0 and r != rank]
        # Others may have given up a moment ago: those that have never come count before them.
        return [r for r in waiting_for if not times[str(r)]] or waiting_for

    seconds = timeout.total_seconds()
    missing = _ask_store(group, meet, seconds + _ANSWER_SECONDS)
    if not missing:
        return
    named = ", ".join(map(str, missing[:_NAMED_RANKS]))
    more = f" and {len(missing) - _NAMED_RANKS} more" if len(missing) > _NAMED_RANKS else ""
    raise RanksDisagreeError(
        label,
        f"{label} is constructed under torch._inductor.config.ddp_fusion on rank {rank}, and after "
        f"{seconds:g} s not on rank {named}{more} of the same process group. Set ddp_fusion on all "
        "ranks, before DistributedDataParallel is constructed; a rank on which it is set may have "
        "raised an error of its own.",
    )


# --- Settings ------------------------------------------------------------------------------------


def compare_settings(
    group: Any, label: str, settings: Mapping[str, Any], device: torch.device
) -> None:
    """Compare settings (by name; what JSON can hold) over the ranks of a process group, which all
    call this: one all-gather of a digest. Where they differ, what they are comes over the group's
    store.

    Raises:
        SettingsDifferError: on every rank; it names each setting that differs, and its values.
    """
    if group.size() == 1:
        return
    text = json.dumps(settings, sort_keys=True)
    # As a signed number of 64 bits.
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    digests = all_gather(group, torch.tensor([number], device=device)).tolist()
    if len(set(digests)) == 1:
        return
    store = group.get_group_store()
    place = f"ddp_fusion/settings/{label}"
    store.set(f"{place}/{group.rank()}", text)
    first = {digest: digests.index(digest) for digest in digests}
    texts = {rank: store.get(f"{place}/{rank}").decode() for rank in first.values()}
    values = [json.loads(texts[first[digest]]) for digest in digests]
    raise SettingsDifferError(label, _in_words(label, values))


def _in_words(label: str, values: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"The ranks of {label} have not been given the same settings."]
    # Ranks with other releases of the package may name other settings.
    for name in dict.fromkeys(name for named in values for name in named):
        by_value: dict[str, list[str]] = {}
        for rank, named in enumerate(values):
            by_value.setdefault(json.dumps(named.get(name)), []).append(str(rank))
        if len(by_value) > 1:
            lines.append(f"{name} must be the same on all ranks, but is:")
            lines += [f"  {value} on rank {', '.join(r)}" for value, r in by_value.items()]
    return "\n".join([*lines, "Set it to one value on all ranks, before DistributedDataParallel."])
