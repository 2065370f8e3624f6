"""``join``: ranks that have run out of inputs take part in the reductions of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from testing.models import linear_loss
from testing.scenarios.features.loops import wrapped
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run

Steps = Sequence[Sequence[int]]


def uneven(
    run: Run,
    steps: Steps = ((2, 4),),
    *,
    model: str = "layers",
    ddp: Mapping[str, Any] | None = None,
    hook: str = "",
    by_initial: bool = True,
    **loop: Any,
) -> None:
    """Train with uneven inputs.

    Args:
        steps: number of inputs of each rank, for each time that ranks are joined.
        model: as in :func:`wrapped`, like ``ddp`` and ``hook``.
        by_initial: whether gradients are divided by the initial world size, or by the number of
            ranks that still have inputs.
        loop: fields of the loop.
    """
    joined = wrapped(run, model, ddp=ddp, hook=hook)
    if "takes" in loop:
        loop["before_note"] = _drop_zeros
    for counts in steps:
        with joined.join(divide_by_initial_world_size=by_initial):
            train(run, joined, steps=counts[dist.get_rank()], **loop)
    run.note_end(joined)


def _drop_zeros(ddp: nn.Module, _: bool) -> None:
    """Drop gradients of zeros. Joined ranks of eager DDP report each parameter as used that any
    rank has used before: a parameter that no rank uses then has a gradient of zeros, and under the
    flag none."""
    for parameter in ddp.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


def static_graph(run: Run) -> None:
    """``join`` with ``static_graph``; one rank has no inputs in later iterations, or in the first
    ones."""
    for steps in (((2, 4), (3, 1)), ((0, 3), (3, 1))):
        uneven(run, steps, ddp=_static_graph(run, steps))


def static_graph_of_some(run: Run) -> None:
    """``join`` with ``static_graph``; no rank uses one branch, and only one rank uses another."""
    for steps in (((2, 4), (3, 1)), ((3, 0), (2, 1))):
        uneven(run, steps, model="branches", takes="b/", ddp=_static_graph(run, steps))


def _static_graph(run: Run, steps: Steps) -> dict[str, bool]:
    """Set ``static_graph``, except for eager DDP if it ends with an error of Gloo's: if a rank has
    no inputs in the first iteration, another option gives its gradients."""
    has_graph = all(steps[0]) or run.is_fused
    return {"static_graph" if has_graph else "find_unused_parameters": True}


def beside_an_optimizer(run: Run) -> None:
    """``join`` together with another joinable: torch's optimizer that shards its state."""
    ddp, forward = run.compiled(run.mlp())
    optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    with Join([ddp, optimizer]):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            linear_loss(forward, run.rows(step)).backward()
            run.note_backward(ddp)
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.grad.sign_()  # Parameters stay integers.
            optimizer.step()
    run.note_end(ddp)


def disabled(run: Run) -> None:
    """``join(enable=False)``."""
    ddp, forward = run.compiled(run.mlp())
    with ddp.join(enable=False):
        backwards(run, ddp, forward, 2)
