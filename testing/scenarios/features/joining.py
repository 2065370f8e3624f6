"""``join``: ranks that have run out of inputs take part in what the others reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from testing.models import OUTPUTS, Branching, linear_loss
from testing.scenarios.features.buffers import Counting
from testing.scenarios.features.hooks import summing_hook
from testing.scenarios.loop import BySign
from testing.scenarios.run import Run, synced_if


@dataclass(frozen=True)
class _Uneven:
    """A training with uneven inputs.

    Attributes:
        steps: how many inputs each rank has, for each time that ranks are joined.
        join: options of ``join``.
        local: whether each step has a backward under ``no_sync``, too.
        is_inside: whether the whole step is compiled.
        is_trained: whether parameters move. Where averages round, a sign can be another one.
        sizes: of the batches, in turn.
        takes: the branches that each rank takes, step by step, if the model has some.
    """

    steps: Sequence[Sequence[int]]
    join: Mapping[str, bool] = field(default_factory=dict)
    local: bool = False
    is_inside: bool = False
    is_trained: bool = True
    sizes: Sequence[int] = (4,)
    takes: Sequence[Sequence[str]] = ()


def _train(run: Run, model: nn.Module, uneven: _Uneven, hook: Any = None, **options: Any) -> None:
    ddp = run.ddp(model, **options)
    if hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    forward = ddp if uneven.is_inside else run.compile(ddp)

    def step(batch: tuple[Tensor, Tensor], *takes: str) -> None:
        inputs, factors = batch
        (forward(inputs, *takes) * factors).sum().backward()

    backward = run.compile(step) if uneven.is_inside else step
    optimizer, rank = BySign(ddp.parameters()), dist.get_rank()
    for counts in uneven.steps:
        with ddp.join(**uneven.join):
            for number in range(counts[rank % len(counts)]):
                optimizer.zero_grad()
                each = uneven.takes[number % len(uneven.takes)] if uneven.takes else ()
                takes = [each[rank % len(each)]] if each else []
                if uneven.local:
                    with synced_if(ddp, False):
                        backward(run.rows(number, 1), *takes)
                size = uneven.sizes[number % len(uneven.sizes)]
                backward(run.rows(number, size=size), *takes)
                _note(run, ddp, has_unused=bool(each))
                if uneven.is_trained:
                    optimizer.step()
    run.note_end(ddp)


def _note(run: Run, ddp: nn.Module, *, has_unused: bool) -> None:
    """Note gradients. Joined ranks of eager DDP say that they have used what any has used before:
    there a parameter that no rank uses has a gradient of zeros, and here none."""
    for parameter in ddp.parameters() if has_unused else ():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None
    run.note_backward(ddp)


NOT_INITIAL = {"divide_by_initial_world_size": False}
UNUSED_STEPS = [[2, 5], [4, 2]]


def some_have_more(run: Run) -> None:
    """Ranks have more inputs, the higher their number."""
    _train(run, run.mlp(), _Uneven([[2, 4] if dist.get_world_size() == 2 else [1, 2, 4, 4]]))


def divided(run: Run) -> None:
    """Divided by the number of ranks that have inputs, several times."""
    has_two = dist.get_world_size() == 2
    steps = [[1, 2], [3, 1]] if has_two else [[1, 2, 4, 4]]
    _train(run, run.mlp(), _Uneven(steps, join=NOT_INITIAL, is_trained=has_two))


def uneven(run: Run, steps: Sequence[Sequence[int]], **options: Any) -> None:
    """Ranks have as many inputs as ``steps`` say, for each time that they are joined."""
    _train(run, run.mlp(), _Uneven(steps, **options))


def several_buckets(run: Run) -> None:
    """Several buckets."""
    _train(run, run.mlp(), _Uneven([[2, 4]]), bucket_cap_mb=0.0005)


def with_buffers(run: Run) -> None:
    """Buffers are rank 0's as long as it has inputs."""
    _train(run, Counting(run.mlp()), _Uneven([[2, 4], [3, 1]]))


def with_a_hook(run: Run) -> None:
    """With a communication hook of the user's own."""
    _train(run, run.mlp(), _Uneven([[2, 4]]), hook=summing_hook)


def with_unused(run: Run) -> None:
    """With parameters that are unused on some ranks."""
    uneven = _Uneven(UNUSED_STEPS, takes=[["a", ""], ["", "a"]])
    _train(run, Branching(outputs=OUTPUTS), uneven, find_unused_parameters=True)


def with_more_unused(run: Run) -> None:
    """The same, and several of them."""
    uneven = _Uneven(UNUSED_STEPS, takes=[["a", "b"], ["", "a"], ["ab", ""]])
    _train(run, Branching(outputs=OUTPUTS), uneven, find_unused_parameters=True)


def with_a_static_graph(run: Run) -> None:
    """With ``static_graph``; one rank has no inputs in later iterations, or in the first ones."""
    for counts in ([[2, 4], [3, 1]], [[0, 3], [3, 1]]):
        _train(run, run.mlp(), _Uneven(counts), **_static_graph(run, counts))


def with_a_static_graph_of_some(run: Run) -> None:
    """With ``static_graph``, where no rank uses a branch, and one rank alone uses another one."""
    for counts in ([[2, 4], [3, 1]], [[3, 0], [2, 1]]):
        uneven = _Uneven(counts, takes=[["b", ""]])
        _train(run, Branching(outputs=OUTPUTS), uneven, **_static_graph(run, counts))


def _static_graph(run: Run, counts: Sequence[Sequence[int]]) -> dict[str, bool]:
    """The option, but where eager DDP ends with an error of Gloo's: if a rank has no inputs in the
    first iteration, another option gives its gradients."""
    has_graph = all(counts[0]) or run.is_fused
    return {"static_graph": True} if has_graph else {"find_unused_parameters": True}


def beside_an_optimizer(run: Run) -> None:
    """Joined with another joinable: the optimizer of torch that shards its state."""
    ddp = run.ddp(run.mlp())
    forward = run.compile(ddp)
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
    ddp = run.ddp(run.mlp())
    forward = run.compile(ddp)
    with ddp.join(enable=False):
        for step in range(2):
            ddp.zero_grad()
            linear_loss(forward, run.rows(step)).backward()
            run.note_backward(ddp)
