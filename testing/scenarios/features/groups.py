"""Several DDP modules in one step, over several process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from testing import models
from testing.scenarios.loop import Loop, train
from testing.scenarios.run import Run

PAIRS = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
"""Two ways to cut four ranks into groups of two."""


def _over_two_groups(run: Run) -> nn.Module:
    groups: list[Any] = []
    for pairs in PAIRS:
        made = [dist.new_group(list(pair)) for pair in pairs]
        groups += [
            group for group, pair in zip(made, pairs, strict=True) if dist.get_rank() in pair
        ]
    rows, columns = groups
    return nn.Sequential(
        run.ddp(run.mlp(2, models.WIDTH), process_group=rows),
        nn.ReLU(),
        run.ddp(run.mlp(2), process_group=columns),
    )


def two_groups(run: Run, **loop: Any) -> None:
    """Two modules, each over other pairs of ranks."""
    train(run, _over_two_groups(run), Loop(**loop))


def two_modules(run: Run) -> None:
    """Two modules over the same group."""
    train(run, nn.Sequential(run.ddp(run.mlp(2, models.WIDTH)), nn.ReLU(), run.ddp(run.mlp(2))))


def two_caps(run: Run) -> None:
    """The same, where one of them has a cap of its own and is cut into buckets."""
    first = run.ddp(run.mlp(3, models.WIDTH))
    second = run.ddp(run.mlp(), bucket_cap_mb=300 / 2**20)
    train(run, nn.Sequential(first, nn.ReLU(), second), Loop(style="inside"))


def alternating(run: Run) -> None:
    """Two modules with an optimizer and a backward of their own, as in a GAN: each in every other
    step."""
    first, second = run.ddp(run.mlp()), run.ddp(run.mlp())
    for _ in range(2):
        train(run, first, Loop(steps=1))
        train(run, second, Loop(steps=1))
