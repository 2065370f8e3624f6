"""The training loops that most features are tested in."""

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
    """Moves each parameter by one against its gradient's sign, so that integers stay integers."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step; ``closure`` is not called."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sgn())


def sgd(rate: float, **options: Any) -> OptimizerOf:
    """An optimizer for models that round, and for gradients without a sign."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


@dataclass(frozen=True)
class Loop:
    """The fields of a training loop.

    Attributes:
        style: the backward outside of a compiled model, inside of a compiled step, or a model whose
            parts the target compiled itself.
        steps: number of optimizer steps; by default three, or as many as ``takes`` names.
        micro_batches: backwards per step.
        no_sync: whether all but the last of these are under ``no_sync``.
        local: the steps that run under ``no_sync``, after which gradients are kept.
        takes: the branches of the model that each rank runs, by step: ``a/bc b`` is ``a`` on rank 0
            and ``bc`` on rank 1, and then ``b`` on both; empty for a model without branches.
        zero: ``"none"``: gradients are set to None before each step; ``"kept"``: set to zero;
            ``"detached"``: set to zero as older programs do; ``"never"``: accumulated from step to
            step.
        loss: function of a model and a batch.
        draw: makes a batch of a given size; by default integers in the run's dtype.
        sizes: batch sizes, in turn.
        seat: ranks with the same number get the same batch; by default, each rank gets its own.
        optimizer: makes the optimizer of the model's parameters.
        moves: whether the optimizer steps; otherwise parameters do not change.
        compiling: options of ``torch.compile``.
        before_step: called with the step number.
        before_note: called with the model, and whether gradients were to be averaged, before they
            are recorded.
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
    before_note: Callable[[nn.Module, bool], object] = lambda _, __: None
    before_update: Callable[[], object] = lambda: None

    @property
    def count(self) -> int:
        """Number of steps."""
        default = len(self.takes.split(" ")) if self.takes else 3
        return default if self.steps is None else self.steps

    def is_synced(self, step: int, micro: int) -> bool:
        """Whether a backward is averaged."""
        return step not in self.local and (not self.no_sync or micro == self.micro_batches - 1)

    def taken(self, step: int) -> list[str]:
        """Arguments of this rank's model, besides its inputs."""
        steps = self.takes.split(" ")
        ranks = steps[step % len(steps)].split("/")
        return [ranks[dist.get_rank() % len(ranks)]] if self.takes else []


def train(run: Run, model: nn.Module, **loop: Any) -> None:
    """Train a model whose DDP modules are all constructed, and record everything that is compared;
    the loop is a :class:`Loop` with these fields."""
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
            written.before_note(model, synced)
            run.note_backward(model, synced=synced)
        written.before_update()
        if written.moves:
            optimizer.step()
    run.note_end(model)


def clear_gradients(model: nn.Module, zero: Zero, zero_grad: Callable[..., None]) -> None:
    """Clear a model's gradients as the :class:`Loop` specifies. With tensor parallelism, the
    optimizer's ``zero_grad`` does it, because torch's forward hooks replace the model's parameters.
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
    """Forward and backward of a batch, compiled as the loop specifies."""
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
    size: int = 4,
    zero: Zero = "none",
    synced: bool = True,
) -> None:
    """Run forwards with one backward each, starting without gradients; parameters do not change.

    Args:
        run: run in which gradients are recorded.
        model: model whose gradients are recorded.
        forward: the function to call: the model, or its compiled version.
        steps: number of forwards.
        takes: further arguments of the forward.
        first: number of the first batch.
        size: batch size.
        zero: as in :class:`Loop`, before each backward.
        synced: whether gradients are averaged, that is, not under ``no_sync``.
    """
    for step in range(first, first + steps):
        clear_gradients(model, zero, model.zero_grad)
        with synced_if(model, synced):
            linear_loss(forward, run.rows(step, size=size), *takes).backward()
        run.note_backward(model, synced=synced)
