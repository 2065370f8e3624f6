"""One DDP module in one loop: its models, and the ways to write the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing import models
from testing.models import WIDTH, Batch, Loss, linear_loss
from testing.scenarios.features.comm_hooks import HOOKS
from testing.scenarios.features.models import MODELS, with_shared_storage
from testing.scenarios.loop import backwards, sgd, train
from testing.scenarios.run import Run


def wrapped(
    run: Run, model: str = "layers", *, ddp: Mapping[str, Any] | None = None, hook: str = ""
) -> Any:
    """One of :data:`MODELS` in DDP with these options, and with one of :data:`HOOKS`, if any."""
    made = run.ddp(MODELS[model](run), **(ddp or {}))
    if hook:
        HOOKS[hook](run, made)
    return made


def plain(
    run: Run,
    model: str = "layers",
    *,
    ddp: Mapping[str, Any] | None = None,
    hook: str = "",
    loss: str = "linear",
    **loop: Any,
) -> None:
    """One forward, one backward, one step; the backward is outside of the compiled model unless the
    fields of the loop say otherwise. The loss is one of :data:`LOSSES`."""
    train(run, wrapped(run, model, ddp=ddp, hook=hook), loss=LOSSES[loss], **loop)


# --- Losses --------------------------------------------------------------------------------------


def _of_halves(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of two forwards of the same module."""
    (x, y), (u, v) = (part.split(2) for part in batch)
    return linear_loss(model, (x, u)) + linear_loss(model, (y, v))


def _behind_a_break(model: nn.Module, batch: Batch) -> Tensor:
    """A loss after a graph break in a compiled step, between the forward and the backward."""
    value = linear_loss(model, batch)
    torch._dynamo.graph_break()
    return value


def _hooked(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose outputs have a hook that doubles their gradient."""
    outputs: Tensor = model(batch[0])
    outputs.register_hook(lambda gradient: gradient * 2)
    return (outputs * batch[1]).sum()


def _of_a_product(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of two forwards: the first saved the buffers that the second receives from another
    rank."""
    x, _ = batch
    return (model(x) * model(x.square())).exp().sum()


LOSSES: Final[Mapping[str, Loss]] = {
    "linear": linear_loss,
    "of halves": _of_halves,
    "of a product": _of_a_product,
    "behind a break": _behind_a_break,
    "hooked": _hooked,
}


def autocast_of(run: Run) -> Loss:
    """A loss under autocast in the run's dtype."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(run.device.type, dtype=run.dtype):
            return linear_loss(model, batch)

    return loss


# --- Loops of their own --------------------------------------------------------------------------


def forwards_then_backwards(run: Run) -> None:
    """Two forwards, and then the backward of each; the first under ``no_sync``, as in a schedule of
    micro-batches."""
    ddp, forward = run.compiled(run.mlp())
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            first = linear_loss(forward, run.rows(step, 0))
        second = linear_loss(forward, run.rows(step, 1))
        with ddp.no_sync():
            first.backward()
        run.note_backward(ddp, synced=False)
        second.backward()
        run.note_backward(ddp)


def evaluation(run: Run) -> None:
    """Forwards without gradients between steps."""
    ddp = run.ddp(run.mlp())

    def evaluate(step: int) -> None:
        run.note_end(ddp)
        ddp.eval()
        with torch.no_grad():
            run.note_values(**{f"evaluated {step}": linear_loss(ddp, run.rows(step, 7))})
        ddp.train()

    train(run, ddp, before_step=evaluate)


def marked_dynamic(run: Run, **loop: Any) -> None:
    """``mark_dynamic`` on the batch, so that no compile may fix its size."""

    def draw(generator: torch.Generator, size: int) -> Batch:
        batch = models.whole_rows(generator, size)
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 0)
        return batch

    train(run, run.ddp(run.mlp()), draw=draw, **loop)


def reentrant_checkpointing(run: Run) -> None:
    """Gradients are kept, and batch sizes change, so sizes become symbolic. In a compiled forward,
    a checkpoint has no backward of its own; in an eager forward, its backward is nested."""
    ddp, compiled = run.compiled(models.Checkpointed(reentrant=True))
    for forward in (compiled, ddp):
        for step in range(3):
            backwards(run, ddp, forward, 1, first=step, size=3 + step, zero="kept")


def upsampled(run: Run) -> None:
    """An eager forward with several batch sizes: from the second on, the trace has symbolic sizes,
    which the backward of the upsampling does not accept."""
    upsample = (nn.Unflatten(1, (1, -1)), nn.Upsample(scale_factor=2), nn.Flatten())
    ddp = run.ddp(nn.Sequential(run.mlp(1, WIDTH // 2), *upsample, run.mlp(1)))
    for step in range(4):
        backwards(run, ddp, ddp, 1, first=step, size=3 + step + dist.get_rank())


def complex_that_stay(run: Run) -> None:
    """Complex gradients exist while something is compiled, and an eager forward saved complex
    tensors: Dynamo makes fake tensors of both."""
    ddp, compiled = run.compiled(models.Complex())
    for number, forward in enumerate((compiled, ddp)):
        for step in range(2):
            backwards(run, ddp, forward, 1, first=step, zero="never")
            with torch.no_grad():
                outputs = forward(run.rows(step)[0])
            run.note_values(**{f"outputs {number} {step}": outputs})


# --- What rounds ---------------------------------------------------------------------------------


def transformer(run: Run, **loop: Any) -> None:
    """A layer of GPT-2."""
    rounding = {"loss": models.language_loss, "draw": models.tokens}
    ddp = run.ddp(models.gpt2(layers=1))
    train(run, ddp, **rounding, optimizer=sgd(0.1, momentum=0.9), **loop)


def batch_norm(
    run: Run, *, is_evaluated: bool = False, is_shared: bool = False, **loop: Any
) -> None:
    """Convolutions with BatchNorm; or with channels last and constant statistics; or with
    parameters that are views of one tensor, and statistics that are views of another."""
    rounding = {"loss": models.square_loss, "draw": models.images}
    model: nn.Module = models.ConvNet(channels_last=is_evaluated).train(not is_evaluated)
    if is_shared:
        model = with_shared_storage(model.to(run.device))
    train(run, run.ddp(model), **rounding, optimizer=sgd(0.1, momentum=0.9), **loop)


class _EagerNorm(nn.BatchNorm1d):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def broadcast_between_forwards(run: Run) -> None:
    """Two forwards before a backward: buffers are broadcast between them, which must not affect the
    first one, whether the layer with the buffers is compiled or not."""
    for norm in (nn.BatchNorm1d, _EagerNorm):
        torch.manual_seed(0)
        ddp = run.ddp(nn.Sequential(nn.Linear(WIDTH, 4, bias=False), norm(4)))
        for call, forward in enumerate((ddp, run.compile(ddp))):
            for step in range(2):
                ddp.zero_grad()
                first, second = (forward(run.rows(step, n, size=5)[0]) for n in range(2))
                (first.exp().sum() + second.exp().sum()).backward()
                run.note_backward(ddp)
                values = dict(ddp.named_buffers()).items()
                label = f"{norm.__name__} {call} {step}"
                run.note_values(**{f"{label} {name}": b for name, b in values})


def clipped(run: Run, kind: str, **loop: Any) -> None:
    """``clip_grad_norm_`` before a foreach optimizer."""
    ddp, foreach = run.ddp(run.mlp()), kind != "fused"
    optimizers = {
        "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        "momentum": sgd(2**-6, momentum=0.5, foreach=True),
    }

    def clip() -> None:
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0, foreach=foreach)

    train(run, ddp, optimizer=optimizers[kind], before_update=clip, **loop)


def compiled_step(run: Run) -> None:
    """The optimizer's step is compiled too."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        step: Any = run.compile(optimizer.step)
        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    train(run, run.ddp(run.mlp()), optimizer=make)
