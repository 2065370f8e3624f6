"""Ways to write a training loop."""

from __future__ import annotations

from nightly_matrix.run import Run
from nightly_matrix.training import Loop, train


def plain(run: Run) -> None:
    """One forward, one backward, one step."""
    train(run, run.ddp(run.mlp()))


def backward_inside(run: Run) -> None:
    """As a user writes who compiles the whole step."""
    train(run, run.ddp(run.mlp()), Loop(style="inside"))
