"""Errors that ranks have together: settings that differ, which they compare when a module is
constructed, and a rank that cannot finish a backward.

Such a rank leaves a note in the group's store, so that the others, whose collectives fail by their
timeout, can say why. Nothing is sent in a backward that goes well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusion_passes.torch_private.process_groups import all_gather

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
    _is_silent: bool = False
    """Whether the store has not answered: its host may be what has failed. It is not asked again,
    so that an error comes no later than it must."""

    def leave(self, round_: int, text: str) -> None:
        """Note why this rank cannot finish a round, by its number, which is the same on all ranks;
        the first note of a round stays."""
        if self._left_in == round_ or self.group.size() == 1:
            return
        self._left_in = round_
        key, text = self._key(round_), f"{self.group.rank()} {text[:500]}"
        self._ask(lambda store: store.compare_set(key, "", text))

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
        """What ``ask`` returns of the store; ``None`` where that does not answer within a second,
        or at all. It is asked in a thread: a request to it has no timeout of its own."""
        answers: list[_T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError, TimeoutError, OSError):
                answers.append(ask(self.group.get_group_store()))

        if not self._is_silent:
            thread = threading.Thread(target=run, name="fusion_passes store", daemon=True)
            thread.start()
            thread.join(1.0)
        answer = answers[0] if answers else None
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
    for name in values[0]:
        by_value: dict[str, list[str]] = {}
        for rank, named in enumerate(values):
            by_value.setdefault(json.dumps(named.get(name)), []).append(str(rank))
        if len(by_value) > 1:
            lines.append(f"{name} must be the same on all ranks, but is:")
            lines += [f"  {value} on rank {', '.join(r)}" for value, r in by_value.items()]
    return "\n".join([*lines, "Set it to one value on all ranks, before DistributedDataParallel."])
