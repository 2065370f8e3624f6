"""What a rank leaves in the group's store when its backward cannot be finished, so that the
others, whose collectives fail by their timeout, can say why. Nothing is sent in a backward that
goes well."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch.distributed as dist

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


@dataclass
class Words:
    """The words of the ranks of a module.

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
        """Say why this rank cannot finish a round; the first word of a round stays.

        Args:
            round_: how many rounds have ended, which is the same on all ranks.
            text: for people.
        """
        if self._left_in == round_ or self.group.size() == 1 or self.group.name() == "fake":
            return
        self._left_in = round_
        text = f"{self.group.rank()} {text[:_SHOWN_CHARACTERS]}"
        key = self._key(round_)
        self._ask(lambda: self.group.get_group_store().compare_set(key, "", text))

    def why_failed(self, round_: int, error: Exception) -> RanksDisagreeError | None:
        """What another rank has said, where a collective of this one has failed."""
        if self.group.size() == 1 or not _may_be_a_collectives(error):
            return None
        word = self._ask(functools.partial(self._read, self._key(round_)))
        if not word:
            return None
        rank, _, text = word.partition(" ")
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
        return f"ddp_fusion/word/{self.label}/{round_}"

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
