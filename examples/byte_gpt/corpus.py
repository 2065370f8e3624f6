"""Real text that exists on every machine: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT_SHARE: Final = 0.01
"""Share of the text, at its end, that no rank trains on."""


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, in two parts.

    Attributes:
        train: ``uint8[n]``, trained on.
        held_out: ``uint8[m]``, only to measure the loss.
    """

    train: Tensor
    held_out: Tensor

    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Random pieces of this rank's share of the text.

        Returns:
            inputs and targets, both ``int64[batch, context]``; a target is the byte that follows.
            Equal arguments give equal batches.
        """
        share = self.train.numel() // world_size
        text = self.train[rank * share : (rank + 1) * share]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * world_size + rank)
        starts = torch.randint(text.numel() - context, (batch,), generator=generator)
        return _pieces(text, starts, context)

    def held_out_batch(self, *, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Pieces spread evenly over the held-out text, the same in every call and on every rank."""
        starts = torch.linspace(0, self.held_out.numel() - context - 1, batch).long()
        return _pieces(self.held_out, starts, context)


def standard_library(*, context: int) -> Corpus:
    """The top-level modules of the standard library, by name, one after the other.

    Raises:
        ValueError: the held-out part is too short for a sequence of ``context`` bytes.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    held_out = int(len(text) * HELD_OUT_SHARE)
    if held_out <= context:
        raise ValueError(
            f"--context must be below {held_out:,}, which is {HELD_OUT_SHARE:.0%} of the "
            f"{len(text):,} bytes of Python's standard library in {folder}, but is {context:,}. "
            "Use a smaller --context, or a Python that comes with its sources."
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(train=data[:-held_out], held_out=data[-held_out:])


def _pieces(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
