"""Parameters that take no part in a step, on some ranks or on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from testing.scenarios.features.hooks import summing_hook
from testing.scenarios.loop import Loop, train
from testing.scenarios.run import Run


class Branches(nn.Module):
    """Exact. A layer in the middle that is left out where ``skips`` is set."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.middle, self.last = layers[0], layers[2], layers[4]
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if not self.skips:
            x = self.middle(x).relu()
        out: Tensor = self.last(x)
        return out


def _train_branches(
    run: Run,
    skips: Callable[[int], bool],
    loop: Loop | None = None,
    hook: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Train :class:`Branches`, leaving out the layer in the steps where ``skips`` says so."""
    model = Branches(run.mlp())
    loop = loop or Loop()
    ddp = run.ddp(model, **options)
    if hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)

    def choose(step: int) -> None:
        model.skips = skips(step)

    train(
        run,
        ddp,
        Loop(style=loop.style, steps=4, zero=loop.zero, before_step=choose),
    )


def on_all_ranks(run: Run) -> None:
    """The layer is never used."""
    _train_branches(run, lambda _: True, find_unused_parameters=True)


def on_all_ranks_kept(run: Run) -> None:
    """The layer is not used in every other step, and gradients are kept."""
    _train_branches(run, lambda step: step % 2 == 1, Loop(zero="kept"), find_unused_parameters=True)


def on_one_rank(run: Run) -> None:
    """The layer is never used on rank 1: it gets the average with nothing."""
    rank = dist.get_rank()
    _train_branches(run, lambda _: rank == 1, find_unused_parameters=True)


def on_one_rank_inside(run: Run) -> None:
    """As :func:`on_one_rank`, with the backward inside of the compiled function."""
    rank = dist.get_rank()
    _train_branches(run, lambda _: rank == 1, Loop(style="inside"), find_unused_parameters=True)


def on_changing_ranks(run: Run) -> None:
    """The layer is left out on another rank in each step, and in the last step on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _train_branches(
        run, lambda step: step == 3 or step % ranks == rank, find_unused_parameters=True
    )


def with_users_hook(run: Run) -> None:
    """As :func:`on_changing_ranks`, with a communication hook of the user's own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _train_branches(
        run,
        lambda step: step == 3 or step % ranks == rank,
        hook=summing_hook,
        find_unused_parameters=True,
    )


def all_used(run: Run) -> None:
    """The option is set, and everything is used."""
    _train_branches(run, lambda _: False, find_unused_parameters=True)


def skipped_reduction(run: Run) -> None:
    """``skip_all_reduce_unused_params`` with a layer that no rank uses."""
    _train_branches(
        run, lambda _: True, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )


def frozen(run: Run) -> None:
    """A layer whose parameters need no gradient."""
    model = run.mlp()
    model[2].requires_grad_(False)
    train(run, run.ddp(model))


def missing_on_one_rank(run: Run) -> None:
    """A gradient is missing on rank 1 from the start, and no option allows it."""
    rank = dist.get_rank()
    _train_branches(run, lambda _: rank == 1)
