"""The training loops that most features are tried in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from testing.models import Batch, Loss, linear_loss, whole_rows
from testing.scenarios.run import Run, synced_if

Style = Literal["outside", "inside", "as it is"]
Zero = Literal["none", "kept", "detached", "never"]
Draw = Callable[[torch.Generator, int], Batch]
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


def sgd(rate: float, **options: Any) -> OptimizerOf:
    """An optimizer for models that round, and for gradients that have no sign."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


@dataclass(frozen=True)
class Loop:
    """How a training loop is written.

    Attributes:
        style: the backward outside of a compiled model, inside of a compiled step, or a model of
            which the target has compiled what it wants.
        steps: of the optimizer; by default three, or as many as ``takes`` names.
        micro_batches: backwards in a step.
        no_sync: whether all but the last of these are under ``no_sync``.
        local: the steps that run under ``no_sync``, after which gradients stay.
        takes: the branches of the model that each rank takes, by step: ``a/bc b`` is ``a`` on rank
            0 and ``bc`` on rank 1, and then ``b`` on both; empty for a model without branches.
        zero: ``"none"``: gradients are dropped before each step; ``"kept"``: set to zero;
            ``"detached"``: likewise, as older programs do it; ``"never"``: added to from step to
            step.
        loss: of a model and a batch.
        draw: makes a batch of a size; by default whole numbers in the run's dtype.
        sizes: of the batches, in turn.
        seat: ranks with the same number get the same batch; by default, each its own.
        optimizer: of the model's parameters.
        moves: whether it steps; if not, parameters stay as they are.
        compiling: options of ``torch.compile``.
        before_step: called with the number of the step.
        before_note: called with the model before its gradients are noted.
        before_update: called between the last backward of a step and the optimizer.
    """

    style: Style = "outside"
    steps: int | None = None
    micro_batches: int = 1
    no_sync: bool = False
    local: tuple[int, ...] = ()
    takes: str = ""
    zero: Zero = "none"
    loss: Loss = linear_loss
    draw: Draw | None = None
    sizes: tuple[int, ...] = (4,)
    seat: int | None = None
    optimizer: OptimizerOf = BySign
    moves: bool = True
    compiling: Mapping[str, Any] = field(default_factory=dict)
    before_step: Callable[[int], None] = lambda _: None
    before_note: Callable[[nn.Module], object] = lambda _: None
    before_update: Callable[[], object] = lambda: None

    @property
    def count(self) -> int:
        """How many steps there are."""
        default = len(self.takes.split(" ")) if self.takes else 3
        return default if self.steps is None else self.steps

    def is_synced(self, step: int, micro: int) -> bool:
        """Whether a backward is averaged."""
        return step not in self.local and (not self.no_sync or micro == self.micro_batches - 1)

    def taken(self, step: int) -> list[str]:
        """What this rank calls the model with, beside its inputs."""
        steps = self.takes.split(" ")
        ranks = steps[step % len(steps)].split("/")
        return [ranks[dist.get_rank() % len(ranks)]] if self.takes else []


def train(run: Run, model: nn.Module, **loop: Any) -> None:
    """Train a model, all of whose DDP modules are made, and note all that is to be compared; the
    loop is written as a :class:`Loop` with these fields."""
    written = Loop(**loop)
    backward = backward_of(run, model, written)
    optimizer = written.optimizer(model.parameters())
    for step in range(written.count):
        written.before_step(step)
        if step - 1 not in written.local:
            clear_gradients(model, written.zero, optimizer.zero_grad)
        for micro in range(written.micro_batches):
            synced = written.is_synced(step, micro)
            with synced_if(model, synced):
                backward(batch_of(run, written, step, micro), *written.taken(step))
            written.before_note(model)
            run.note_backward(model, synced=synced)
        written.before_update()
        if written.moves:
            optimizer.step()
    run.note_end(model)


def clear_gradients(model: nn.Module, zero: Zero, zero_grad: Callable[..., None]) -> None:
    """Clear a model's gradients, as a :class:`Loop` says. With tensor parallelism, where torch's
    forward hooks put others in the places of its parameters, the optimizer's ``zero_grad`` does it.
    """
    if zero == "detached":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
    elif zero != "never":
        zero_grad(set_to_none=zero == "none")


def batch_of(run: Run, loop: Loop, step: int, micro: int) -> Batch:
    """This rank's batch for one backward."""
    draw = loop.draw or functools.partial(whole_rows, dtype=run.dtype)
    size = loop.sizes[step % len(loop.sizes)]
    return run.drawn(draw, step, micro, seat=loop.seat, size=size)


def backward_of(run: Run, model: nn.Module, loop: Loop) -> Callable[..., None]:
    """Forward and backward of a batch, compiled as the loop says."""
    forward = run.compile(model, **loop.compiling) if loop.style == "outside" else model

    def backward(batch: Batch, *takes: str) -> None:
        loop.loss(forward, batch, *takes).backward()

    return run.compile(backward, **loop.compiling) if loop.style == "inside" else backward


def backwards(
    run: Run,
    model: nn.Module,
    forward: Any,
    steps: int = 3,
    *takes: Any,
    first: int = 0,
    micro: int = 0,
    size: int = 4,
    zero: Zero = "none",
    synced: bool = True,
) -> None:
    """Forwards with a backward each, from no gradients; parameters stay as they are.

    Args:
        run: where gradients are noted.
        model: whose.
        forward: what is called: the model, or what was compiled of it.
        steps: how many.
        takes: more arguments of the forward.
        first: the number of the first batch.
        micro: which batch of that number.
        size: of a batch.
        zero: as of a :class:`Loop`, before each backward.
        synced: whether they are averaged: not under ``no_sync``.
    """
    for step in range(first, first + steps):
        clear_gradients(model, zero, model.zero_grad)
        with synced_if(model, synced):
            linear_loss(forward, run.rows(step, micro, size=size), *takes).backward()
        run.note_backward(model, synced=synced)
