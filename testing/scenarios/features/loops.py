"""One DDP module in one loop: what is trained in it, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.models import OUTPUTS, WIDTH, Batch, Exact, Loss, linear_loss
from testing.scenarios.loop import backwards, sgd, steps_of, train
from testing.scenarios.run import Run


def plain(
    run: Run,
    model: str = "layers",
    *,
    ddp: Mapping[str, Any] | None = None,
    loss: str = "linear",
    **loop: Any,
) -> None:
    """One forward, one backward, one step; the backward outside of the compiled model, if ``loop``
    says nothing else.

    Args:
        run: where it is noted.
        model: one of :data:`MODELS`.
        ddp: options of ``DistributedDataParallel``.
        loss: one of :data:`LOSSES`.
        loop: fields of :class:`testing.scenarios.loop.Loop`.
    """
    train(run, run.ddp(MODELS[model](run), **(ddp or {})), loss=LOSSES[loss], **loop)


# --- Models --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Exact. A buffer that sums its inputs, which differ on each rank, and is added to the output;
    and one that counts forwards."""

    total: Tensor
    count: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("total", torch.zeros(OUTPUTS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        # Added, for no gradient depends on it then: torch's compiled backward computes anew what
        # was read of a buffer that the forward writes, from what was written (torch 2.13 and 2.15,
        # also without DDP).
        out = out + self.total
        with torch.no_grad():
            self.total.add_(x[:, :OUTPUTS].sum(0))
            self.count.add_(1)
        return out


class _Shifting(nn.Module):
    """Exact. A buffer that is added to the output, and stays. Where Inductor lowers no operator, it
    is what was broadcast, as the step leaves it."""

    shift: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("shift", torch.ones(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shift


class _Kinds(Exact):
    """Exact. Parameters of several dtypes and layouts, one of them complex."""

    def __init__(self) -> None:
        super().__init__(
            first=nn.Linear(WIDTH, WIDTH),
            factor=nn.Parameter(torch.empty(WIDTH, dtype=torch.float64)),
            phase=nn.Parameter(torch.empty(WIDTH, 2, dtype=torch.complex64)),
            across=nn.Parameter(torch.empty(WIDTH, WIDTH).t()),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() @ self.across
        out = (x * self.factor).sum() + (x * self.phase.sum(1)).real.sum().double()
        return out.reshape(1, 1)


class _Broken(nn.Module):
    """Exact. A graph break in the middle of its forward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        middle = len(self.layers) // 2
        x = self.layers[:middle](x)
        torch._dynamo.graph_break()
        return self.layers[middle:](x)


class _Disabled(Exact, first=WIDTH, middle=WIDTH, last=OUTPUTS):
    """Exact. ``torch.compiler.disable`` on the forward of one layer: those before it and behind it
    are compiled. In a ``Sequential``, whose loop it would break, nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.forward = torch.compiler.disable(self.middle.forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def _partly_compiled(run: Run) -> nn.Module:
    """One layer is compiled, and nothing else."""
    model = run.mlp()
    model[2] = run.compile(model[2])
    return model


def _frozen(run: Run) -> nn.Module:
    """A layer whose parameters need no gradient."""
    model = run.mlp()
    model[2].requires_grad_(False)
    return model


def _unusual(_: Run) -> nn.Module:
    """Tied and frozen parameters, and buffers."""
    model = models.Tied()
    model.middle.requires_grad_(False)
    return Counting(model)


def _ignored(run: Run) -> nn.Module:
    """Parameters that DDP is told to leave alone stay each rank's own."""
    model, names = run.mlp(), ["2.weight", "2.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def _shared_storage(run: Run) -> nn.Module:
    """All parameters are views of one buffer."""
    model = run.mlp().to(run.device)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.data = part.view_as(parameter)
    return model


MODELS: Final[Mapping[str, Callable[[Run], nn.Module]]] = {
    "layers": Run.mlp,
    "two layers": lambda run: run.mlp(2),
    "five layers": lambda run: run.mlp(5),
    "tied": lambda _: models.Tied(),
    "layouts": lambda _: models.Layouts(),
    "scalars": lambda _: models.Shapes(),
    "complex": lambda _: models.Complex(),
    "two dtypes": lambda _: models.TwoDtypes(),
    "kinds": lambda _: _Kinds(),
    "unusual": _unusual,
    "frozen": _frozen,
    "ignored": _ignored,
    "shared storage": _shared_storage,
    "checkpointed": lambda _: models.Checkpointed(),
    "counting": lambda run: Counting(run.mlp()),
    "shifting": lambda run: _Shifting(run.mlp()),
    "broken": lambda run: _Broken(run.mlp()),
    "disabled": lambda _: _Disabled(),
    "partly compiled": _partly_compiled,
    "compiled": lambda run: run.compile(run.mlp()),
}


# --- Losses --------------------------------------------------------------------------------------


def _of_halves(model: nn.Module, batch: Batch) -> Tensor:
    """Of two forwards of the same module."""
    (x, y), (u, v) = (part.split(2) for part in batch)
    return linear_loss(model, (x, u)) + linear_loss(model, (y, v))


def _behind_a_break(model: nn.Module, batch: Batch) -> Tensor:
    """A graph break in a compiled step between the forward and the backward."""
    value = linear_loss(model, batch)
    torch._dynamo.graph_break()
    return value


def _hooked(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of the outputs is doubled by a hook."""
    outputs: Tensor = model(batch[0])
    outputs.register_hook(lambda gradient: gradient * 2)
    return (outputs * batch[1]).sum()


LOSSES: Final[Mapping[str, Loss]] = {
    "linear": linear_loss,
    "of halves": _of_halves,
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
    """Two forwards, and then the backward of each; the first under ``no_sync``, as a schedule of
    micro-batches does it."""
    ddp, forward = run.compiled(run.mlp())
    for step in steps_of(run, ddp, 3):
        with ddp.no_sync():
            first = linear_loss(forward, run.rows(step, 0))
        second = linear_loss(forward, run.rows(step, 1))
        with ddp.no_sync():
            first.backward()
        run.note_backward(ddp, synced=False)
        second.backward()
        run.note_backward(ddp)


def evaluation(run: Run) -> None:
    """Forwards without gradients between the steps."""
    ddp = run.ddp(run.mlp())

    def evaluate(step: int) -> None:
        run.note_end(ddp)
        ddp.eval()
        with torch.no_grad():
            run.note_values(**{f"evaluated {step}": linear_loss(ddp, run.rows(step, 7))})
        ddp.train()

    train(run, ddp, before_step=evaluate)


def marked_dynamic(run: Run, **loop: Any) -> None:
    """``mark_dynamic`` on the batch, which allows no compile to fix its size."""

    def draw(generator: torch.Generator, size: int) -> Batch:
        batch = models.whole_rows(generator, size)
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 0)
        return batch

    train(run, run.ddp(run.mlp()), draw=draw, **loop)


def reentrant_checkpointing(run: Run) -> None:
    """Gradients are kept, and batch sizes change: their sizes become symbols. Compiled, a
    checkpoint is none of its own; in an eager forward its backward runs inside of another."""
    ddp, compiled = run.compiled(models.Checkpointed(reentrant=True))
    for forward in (compiled, ddp):
        for step in range(3):
            backwards(run, ddp, forward, 1, first=step, size=3 + step, zero="kept")


def upsampled(run: Run) -> None:
    """An eager forward with several batch sizes: from the second on, the trace has symbols, which
    the backward of the upsampling does not take."""
    upsample = (nn.Unflatten(1, (1, -1)), nn.Upsample(scale_factor=2), nn.Flatten())
    ddp = run.ddp(nn.Sequential(run.mlp(1, WIDTH // 2), *upsample, run.mlp(1)))
    for step in range(4):
        backwards(run, ddp, ddp, 1, first=step, size=3 + step + dist.get_rank())


def complex_that_stay(run: Run) -> None:
    """Complex gradients are there while something is compiled, and an eager forward has saved
    complex tensors: Dynamo makes fake tensors of both."""
    ddp, compiled = run.compiled(models.Complex())
    for number, forward in enumerate((compiled, ddp)):
        for step in range(2):
            backwards(run, ddp, forward, 1, first=step, zero="never")
            with torch.no_grad():
                outputs = forward(run.rows(step)[0])
            run.note_values(**{f"outputs {number} {step}": outputs})


class _Embedded(Exact):
    """Exact. A sparse embedding in front of a layer."""

    def __init__(self, kind: Any, **options: Any) -> None:
        embedding = kind(16, WIDTH, sparse=True, **options)
        super().__init__(embedding=embedding, layer=nn.Linear(WIDTH, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x.long().abs() % 16)
        return self.layer(embedded.sum(1) if embedded.dim() > 2 else embedded)


def sparse(run: Run, *, has_bag: bool = False, **loop: Any) -> None:
    """``nn.Embedding(sparse=True)``, or ``nn.EmbeddingBag(sparse=True)``."""
    bag = _Embedded(nn.EmbeddingBag, mode="sum") if has_bag else _Embedded(nn.Embedding)
    train(run, run.ddp(bag), optimizer=sgd(1.0), steps=2, **loop)


# --- What rounds ---------------------------------------------------------------------------------


def transformer(run: Run, **loop: Any) -> None:
    """A layer of GPT-2."""
    rounding = {"loss": models.language_loss, "draw": models.tokens}
    ddp = run.ddp(models.gpt2(layers=1))
    train(run, ddp, **rounding, optimizer=sgd(0.1, momentum=0.9), **loop)


def batch_norm(run: Run, *, is_evaluated: bool = False, **loop: Any) -> None:
    """Convolutions with BatchNorm; or with channels last, and statistics that stay."""
    rounding = {"loss": models.square_loss, "draw": models.images}
    ddp = run.ddp(models.ConvNet(channels_last=is_evaluated).train(not is_evaluated))
    train(run, ddp, **rounding, optimizer=sgd(0.1, momentum=0.9), **loop)


class _EagerNorm(nn.BatchNorm1d):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def broadcast_between_forwards(run: Run) -> None:
    """Two forwards before a backward: buffers are broadcast between them, which the first one must
    not mind, whether the layer that has them is compiled or not."""
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
    """``clip_grad_norm_`` before an optimizer that works on many gradients at once."""
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
