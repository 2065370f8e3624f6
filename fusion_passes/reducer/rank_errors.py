"""Errors that concern several ranks: a rank does not construct a module under the flag, settings
differ between ranks (compared when a module is constructed), or a rank cannot finish a backward.

A rank that cannot finish a backward leaves a note in the process group's store. The other ranks,
whose collectives time out, read the note and can say why. A backward that succeeds sends no note.
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
"""How long a rank waits for the other ranks to construct a module under the flag, in seconds; the
group's timeout applies if it is shorter. Before the wait, all ranks have run the collectives of
DDP's constructor. The code between these and the wait takes a rank some seconds for the largest
models, and a broadcast of parameters over a slow network ends some seconds earlier on the first
rank than on the last."""

_ANSWER_SECONDS: Final = 10.0
"""How long the store may take to answer beyond the time that it is told to wait, in seconds."""

_NAMED_RANKS: Final = 8
"""Largest number of missing ranks that an error names."""

_T = TypeVar("_T")


class RanksDisagreeError(RuntimeError):
    """The ranks of a module cannot run the same collectives. The message says why.

    Attributes:
        module: label of the DDP module.
    """

    def __init__(self, module: str, text: str) -> None:
        super().__init__(text)
        self.module = module


class SettingsDifferError(RanksDisagreeError):
    """The ranks of a module have different settings. The message says which."""


@dataclass
class FailureNotes:
    """Notes that ranks of a module leave in the process group's store when they cannot finish a
    backward."""

    group: Any
    label: str
    _left_in: int = -1
    _left: str = ""
    _is_silent: bool = False
    """Whether the store did not answer: its host may be what failed. It is not asked again, so that
    the error is not delayed further."""

    def leave(self, iteration: int, text: str) -> None:
        """Note why this rank cannot finish an iteration, given by its number, which is the
        same on all ranks. Only the first note of an iteration is kept."""
        if self._left_in == iteration or self.group.size() == 1:
            return
        note = f"{self.group.rank()} {text[:500]}"
        self._left_in, self._left = iteration, note
        self._ask(lambda store: store.compare_set(self._key(iteration), "", note))

    def take_back(self, iteration: int) -> None:
        """Remove the note that this rank left in an iteration, if any, because the rank finished
        the iteration after all: the note must not explain a later failure."""
        if self._left_in == iteration:
            self._left_in, note = -1, self._left
            self._ask(lambda store: store.compare_set(self._key(iteration), note, ""))

    def why_failed(self, iteration: int, error: Exception) -> RanksDisagreeError | None:
        """The error that quotes another rank's note, if a collective of this rank may have raised
        ``error``; ``None`` if no other rank left a note."""
        if self.group.size() == 1 or not _may_be_a_collectives(error):
            return None
        key = self._key(iteration)
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
        """The result of ``ask(store)``; ``None`` if the store does not answer within a second."""
        answer = None if self._is_silent else _ask_store(self.group, ask, 1.0)
        self._is_silent = answer is None
        return answer

    def _key(self, iteration: int) -> str:
        return f"ddp_fusion/failure/{self.label}/{iteration}"


def _may_be_a_collectives(error: Exception) -> bool:
    """Whether a collective may have raised an error: Gloo's errors have no class of their own, and
    are known by their text. Any other error is raised unchanged, whatever other ranks noted."""
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    return any(text in str(error) for text in ("gloo", "pair closure", "timed out", "Timed out"))


def _ask_store(group: Any, ask: Callable[[Any], _T], seconds: float) -> _T | None:
    """The result of ``ask(store)`` with a group's store; ``None`` if the store fails, or does not
    answer in this time. ``ask`` runs in a thread: a store request has no timeout of its own."""
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
    """Wait until all ranks of a process group have called this for the module of this number. A
    rank without the flag does not, and a collective would wait for it until the group's timeout.

    Each rank sends a few requests to the group's store, however many ranks there are. If the store
    does not answer, this returns, and the next collective fails if a rank is missing.

    Args:
        group: process group of the module.
        label: label of the module, for messages.
        number: number of the module. It may be used again if this raises an error.
        is_in_step: whether DDP's constructor has just run collectives, so that all ranks arrive
            within :data:`MEET_SECONDS`. Otherwise they may take the group's timeout.

    Raises:
        RanksDisagreeError: names ranks that have not arrived.
    """
    if group.size() == 1:
        return
    prefix, rank = f"ddp_fusion/constructed/{number}", group.rank()
    timeout = group_timeout(group)
    if is_in_step:
        timeout = min(timeout, timedelta(seconds=MEET_SECONDS))

    def meet(store: Any) -> list[int]:
        # Each rank appends its number when it arrives, and once more when it gives up.
        store.append(f"{prefix}/ranks", f"{rank} ")
        if store.add(f"{prefix}/count", 1) == group.size():
            store.set(f"{prefix}/all", "")
        with contextlib.suppress(RuntimeError):  # DistStoreError; its base class with a FileStore.
            store.wait([f"{prefix}/all"], timeout)
            return []
        if store.add(f"{prefix}/count", -1) == group.size() - 1:
            return []  # The last rank has just arrived.
        store.append(f"{prefix}/ranks", f"{rank} ")
        times = Counter(store.get(f"{prefix}/ranks").decode().split())
        waiting_for = [r for r in range(group.size()) if times[str(r)] % 2 == 0 and r != rank]
        # Ranks that arrived and gave up a moment ago are named only if all ranks had arrived.
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
    """Compare settings (by name; values that JSON can hold) over the ranks of a process group, by
    one all-gather of a digest. All ranks call this. If the digests differ, the ranks read each
    other's settings from the group's store.

    Raises:
        SettingsDifferError: on every rank; names each setting that differs, and its values.
    """
    if group.size() == 1:
        return
    text = json.dumps(settings, sort_keys=True)
    # A signed 64-bit integer, which a tensor can hold.
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    digests = all_gather(group, torch.tensor([number], device=device)).tolist()
    if len(set(digests)) == 1:
        return
    store = group.get_group_store()
    prefix = f"ddp_fusion/settings/{label}"
    store.set(f"{prefix}/{group.rank()}", text)
    first = {digest: digests.index(digest) for digest in digests}
    texts = {rank: store.get(f"{prefix}/{rank}").decode() for rank in first.values()}
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
