"""The training loop that most features are tried in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from testing.models import Batch, Loss, linear_loss
from testing.scenarios.run import Run, synced_if

Style = Literal["outside", "inside", "as it is"]
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class BySign(torch.optim.Optimizer):
    """Moves each parameter by one against its gradient's sign: whole numbers stay whole."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not called."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sgn())


@dataclass(frozen=True)
class Loop:
    """How a training loop is written.

    Attributes:
        style: the backward outside of a compiled model, inside of a compiled step, or a model of
            which the target has compiled what it wants.
        steps: of the optimizer.
        micro_batches: backwards in a step.
        no_sync: whether all but the last of these are under ``no_sync``.
        zero: ``"none"``: gradients are dropped before each step; ``"kept"``: set to zero;
            ``"never"``: added to from step to step.
        loss: of a model and a batch.
        draw: makes a batch of a size; by default whole numbers in the run's dtype.
        sizes: of the batches, in turn.
        optimizer: of the model's parameters.
        options: of ``torch.compile``.
        before_step: called with the number of the step.
        before_update: called between the last backward of a step and the optimizer.
    """

    style: Style = "outside"
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False
    zero: Literal["none", "kept", "never"] = "none"
    loss: Loss = linear_loss
    draw: Callable[[torch.Generator, int], Batch] | None = None
    sizes: tuple[int, ...] = (4,)
    optimizer: OptimizerOf = BySign
    options: Mapping[str, Any] = field(default_factory=dict)
    before_step: Callable[[int], None] = lambda _: None
    before_update: Callable[[], object] = lambda: None


def train(run: Run, model: nn.Module, loop: Loop | None = None, **note: Any) -> None:
    """Train a model and note all that is to be compared.

    Args:
        run: where it is noted.
        model: with all its DDP modules made.
        loop: how.
        note: to be compared in the end, beside parameters and buffers.
    """
    loop = loop or Loop()
    backward = backward_of(run, model, loop)
    optimizer = loop.optimizer(model.parameters())
    for step in range(loop.steps):
        loop.before_step(step)
        if loop.zero != "never":
            optimizer.zero_grad(set_to_none=loop.zero == "none")
        for micro in range(loop.micro_batches):
            synced = not loop.no_sync or micro == loop.micro_batches - 1
            run.prepare_forward()
            with synced_if(model, synced):
                backward(batch_of(run, loop, step, micro))
            run.note_backward(model, synced=synced)
        loop.before_update()
        optimizer.step()
    run.note_end(model, **note)


def backwards(run: Run, model: nn.Module, forward: Any, steps: int = 3, *, first: int = 0) -> None:
    """Forwards with a backward each, from no gradients; parameters stay as they are.

    Args:
        run: where gradients are noted.
        model: whose.
        forward: what is called: the model, or what was compiled of it.
        steps: how many.
        first: the number of the first batch.
    """
    for step in range(first, first + steps):
        model.zero_grad()
        linear_loss(forward, run.rows(step)).backward()
        run.note_backward(model)


def batch_of(run: Run, loop: Loop, step: int, micro: int) -> Batch:
    """This rank's batch for one backward."""
    size = loop.sizes[step % len(loop.sizes)]
    if loop.draw is None:
        return run.rows(step, micro, size=size)
    return run.drawn(loop.draw, step, micro, size=size)


def backward_of(run: Run, model: nn.Module, loop: Loop) -> Callable[[Batch], Tensor | None]:
    """Forward and backward of a batch, compiled as the loop says."""
    if loop.style == "inside":

        def inside(batch: Batch) -> None:
            loop.loss(model, batch).backward()

        return run.compile(inside, **loop.options)
    forward = run.compile(model, **loop.options) if loop.style == "outside" else model

    def outside(batch: Batch) -> None:
        loop.loss(forward, batch).backward()

    return outside
