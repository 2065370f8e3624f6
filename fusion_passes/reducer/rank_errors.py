"""Errors that ranks have together: settings that differ, which they compare when a module is
constructed, and a rank that cannot finish a backward.

Such a rank leaves a note in the group's store, so that the others, whose collectives fail by their
timeout, can say why. Nothing is sent in a backward that goes well.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from fusion_passes.torch_private.process_groups import all_gather

_SHOWN_CHARACTERS: Final = 500
"""Of another rank's error."""

_GLOO_TEXTS: Final = ("gloo", "pair closure", "timed out", "Timed out")
"""What errors of Gloo's have in their texts; they have no class of their own."""


_T = TypeVar("_T")

ASKING_SECONDS: Final = 1.0
"""How long the store may take to answer while an error is handled: its host may be what failed."""


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
    """What the ranks of a module leave in the store when they cannot finish a backward.

    Args:
        group: the ranks.
        label: of the module; the same on all ranks.
    """

    group: Any
    label: str
    _left_in: int = -1
    _is_silent: bool = False
    """Whether the store has not answered: its host may be what has failed. It is not asked again,
    so that an error comes no later than it must."""

    def leave(self, round_: int, text: str) -> None:
        """Note why this rank cannot finish a round; the first note of a round stays.

        Args:
            round_: how many rounds have ended, which is the same on all ranks.
            text: for people.
        """
        if self._left_in == round_ or self.group.size() == 1:
            return
        self._left_in = round_
        text = f"{self.group.rank()} {text[:_SHOWN_CHARACTERS]}"
        key = self._key(round_)
        self._ask(lambda: self.group.get_group_store().compare_set(key, "", text))

    def why_failed(self, round_: int, error: Exception) -> RanksDisagreeError | None:
        """What another rank has noted, where a collective of this one has failed."""
        if self.group.size() == 1 or not _may_be_a_collectives(error):
            return None
        note = self._ask(functools.partial(self._read, self._key(round_)))
        if not note:
            return None
        rank, _, text = note.partition(" ")
        if int(rank) == self.group.rank():
            return None
        return RanksDisagreeError(
            self.label,
            f"A collective of {self.label} under ddp_fusion has failed, since rank {rank} "
            f"cannot finish its backward: {text}",
        )

    def _ask(self, ask: Callable[[], Any]) -> Any:
        answer = None if self._is_silent else asked(ask)
        self._is_silent = answer is None
        return answer

    def _key(self, round_: int) -> str:
        return f"ddp_fusion/failure/{self.label}/{round_}"

    def _read(self, key: str) -> str:
        store = self.group.get_group_store()
        return store.get(key).decode() if store.check([key]) else ""


def _may_be_a_collectives(error: Exception) -> bool:
    """Whether a collective has raised an error, as far as can be told. A user's own goes on as it
    is, whatever the other ranks do."""
    texts = _GLOO_TEXTS if type(error) is RuntimeError else ()
    return isinstance(error, dist.DistError) or any(text in str(error) for text in texts)


def asked(ask: Callable[[], _T]) -> _T | None:
    """What ``ask`` returns; ``None`` where the store does not answer, in time or at all: a request
    to it has no timeout of its own.

    Args:
        ask: is called in a thread.
    """
    results: list[_T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, OSError):
            results.append(ask())

    thread = threading.Thread(target=run, name="fusion_passes store", daemon=True)
    thread.start()
    thread.join(ASKING_SECONDS)
    return results[0] if results else None


# --- Settings ------------------------------------------------------------------------------------


def compare_settings(
    group: Any, label: str, settings: Mapping[str, Any], device: torch.device
) -> None:
    """Compare settings over the ranks of a process group: one all-gather of a digest. Where they
    differ, what they are comes over the group's store.

    Args:
        group: the ranks; all of them must call this.
        label: of the module, for people; the same on all ranks.
        settings: by name; what JSON can hold.
        device: of what the group sends.

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
