"""``join``: ranks that have run out of inputs take part in what the others reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from testing.models import OUTPUTS, Batch, Branching, linear_loss
from testing.scenarios.features.comm_hooks import summing_hook
from testing.scenarios.features.loops import Counting
from testing.scenarios.features.unused import branches_of
from testing.scenarios.loop import BySign, backwards
from testing.scenarios.run import Run

Steps = Sequence[Sequence[int]]

MODELS: Final[Mapping[str, Callable[[Run], nn.Module]]] = {
    "layers": Run.mlp,
    "counting": lambda run: Counting(run.mlp()),
    "branches": lambda _: Branching(outputs=OUTPUTS),
}


def uneven(
    run: Run,
    steps: Steps = ((2, 4),),
    *,
    model: str = "layers",
    ddp: Mapping[str, Any] = MappingProxyType({}),
    has_hook: bool = False,
    by_initial: bool = True,
    local: bool = False,
    is_inside: bool = False,
    is_trained: bool = True,
    sizes: Sequence[int] = (4,),
    takes: str = "",
) -> None:
    """Train with uneven inputs.

    Args:
        run: where it is noted.
        steps: how many inputs each rank has, for each time that ranks are joined.
        model: one of :data:`MODELS`. Buffers are rank 0's as long as it has inputs.
        ddp: options of ``DistributedDataParallel``.
        has_hook: whether there is a communication hook of the user's own.
        by_initial: whether gradients are divided by the initial world size, or by the number of
            ranks that have inputs.
        local: whether each step has a backward under ``no_sync``, too.
        is_inside: whether the whole step is compiled.
        is_trained: whether parameters move. Where averages round, a sign can be another one.
        sizes: of the batches, in turn.
        takes: the branches that each rank takes, if the model has some, as of
            :func:`testing.scenarios.features.unused.branches_of`.
    """
    joined = run.ddp(MODELS[model](run), **ddp)
    if has_hook:
        joined.register_comm_hook(dist.group.WORLD, summing_hook)
    forward = joined if is_inside else run.compile(joined)

    def step(batch: Batch, *takes: str) -> None:
        linear_loss(forward, batch, *takes).backward()

    backward = run.compile(step) if is_inside else step
    optimizer, rank = BySign(joined.parameters()), dist.get_rank()
    branches = branches_of(takes)
    for counts in steps:
        with joined.join(divide_by_initial_world_size=by_initial):
            for number in range(counts[rank]):
                optimizer.zero_grad()
                each = branches[number % len(branches)]
                taken = [each[rank]] if takes else []
                if local:
                    with joined.no_sync():
                        backward(run.rows(number, 1), *taken)
                backward(run.rows(number, size=sizes[number % len(sizes)]), *taken)
                _note(run, joined, has_unused=bool(takes))
                if is_trained:
                    optimizer.step()
    run.note_end(joined)


def _note(run: Run, ddp: nn.Module, *, has_unused: bool) -> None:
    """Note gradients. Joined ranks of eager DDP say that they have used what any has used before:
    there a parameter that no rank uses has a gradient of zeros, and here none."""
    for parameter in ddp.parameters() if has_unused else ():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
    run.note_backward(ddp)


def static_graph(run: Run) -> None:
    """With ``static_graph``; one rank has no inputs in later iterations, or in the first ones."""
    for steps in (((2, 4), (3, 1)), ((0, 3), (3, 1))):
        uneven(run, steps, ddp=_static_graph(run, steps))


def static_graph_of_some(run: Run) -> None:
    """With ``static_graph``, where no rank uses a branch, and one rank alone uses another one."""
    for steps in (((2, 4), (3, 1)), ((3, 0), (2, 1))):
        uneven(run, steps, model="branches", takes="b/", ddp=_static_graph(run, steps))


def _static_graph(run: Run, steps: Steps) -> dict[str, bool]:
    """The option, but where eager DDP ends with an error of Gloo's: if a rank has no inputs in the
    first iteration, another option gives its gradients."""
    has_graph = all(steps[0]) or run.is_fused
    return {"static_graph" if has_graph else "find_unused_parameters": True}


def beside_an_optimizer(run: Run) -> None:
    """Joined with another joinable: the optimizer of torch that shards its state."""
    ddp, forward = run.compiled(run.mlp())
    optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    with Join([ddp, optimizer]):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            linear_loss(forward, run.rows(step)).backward()
            run.note_backward(ddp)
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.grad.sign_()  # Parameters stay whole numbers.
            optimizer.step()
    run.note_end(ddp)


def disabled(run: Run) -> None:
    """``join(enable=False)``."""
    ddp, forward = run.compiled(run.mlp())
    with ddp.join(enable=False):
        backwards(run, ddp, forward, 2)
