"""What a rank leaves in the group's store when its backward cannot be finished, so that the
others, whose collectives fail by their timeout, can say why. Nothing is sent in a backward that
goes well."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from fusion_passes.agreement.exchange import asked
from fusion_passes.agreement.rendezvous import RanksDisagreeError

_SHOWN_CHARACTERS: Final = 500
"""Of another rank's error."""

_GLOO_TEXTS: Final = ("gloo", "pair closure", "timed out", "Timed out")
"""What errors of Gloo's have in their texts; they have no class of their own."""


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
        asked(lambda: self.group.get_group_store().compare_set(key, "", text))

    def why_failed(self, round_: int, error: Exception) -> RanksDisagreeError | None:
        """What another rank has said, where a collective of this one has failed."""
        if self.group.size() == 1 or not _may_be_a_collectives(error):
            return None
        word = asked(functools.partial(self._read, self._key(round_)))
        if not word:
            return None
        rank, _, text = word.partition(" ")
        if int(rank) == self.group.rank():
            return None
        return RanksDisagreeError(
            self.label,
            {},
            text=f"A collective of {self.label} under ddp_fusion has failed, since rank {rank} "
            f"cannot finish its backward: {text}",
        )

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
