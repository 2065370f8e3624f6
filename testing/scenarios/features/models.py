"""Models by name, for entries of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.models import OUTPUTS, WIDTH, Branching, Exact
from testing.scenarios.run import Run


class Counting(nn.Module):
    """Exact. A buffer that sums its inputs, which differ between ranks, and is added to the output;
    and a buffer that counts forwards."""

    total: Tensor
    count: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("total", torch.zeros(OUTPUTS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        # Added, so that no gradient depends on it: torch's compiled backward recomputes values read
        # from a buffer that the forward writes from the written values (torch 2.13 and 2.15, also
        # without DDP).
        out = out + self.total
        with torch.no_grad():
            self.total.add_(x[:, :OUTPUTS].sum(0))
            self.count.add_(1)
        return out


class _Shifting(nn.Module):
    """Exact. A buffer that is added to the output and does not change. If Inductor lowers no
    operators, it is the broadcast value after the step."""

    shift: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("shift", torch.ones(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.shift


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
    """Exact. ``torch.compiler.disable`` on the forward of one layer: the layers before and after it
    are compiled. In a ``Sequential``, whose loop would break, nothing would be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.forward = torch.compiler.disable(self.middle.forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


@torch.compiler.disable
def as_it_is(x: Tensor) -> Tensor:
    """The input; not compiled."""
    return x.relu()


class InParts(Exact, first=36):
    """Exact. Functions that are not compiled split its forward in three. The weights in the middle
    are in another order than their gradients are computed."""

    def __init__(self) -> None:
        super().__init__(last=nn.Linear(32, OUTPUTS), middle=nn.Conv2d(2, 2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = as_it_is(self.first(x)).reshape(-1, 1, 6, 6).expand(-1, 2, 6, 6)
        y = y.contiguous(memory_format=torch.channels_last)
        return self.last(as_it_is(self.middle(y)).flatten(1))


def _partly_compiled(run: Run) -> nn.Module:
    """A model with one compiled layer."""
    model = run.mlp()
    model[2] = run.compile(model[2])
    return model


def _frozen(run: Run) -> nn.Module:
    """A model with a layer whose parameters need no gradient."""
    model = run.mlp()
    model[2].requires_grad_(False)
    return model


def _unusual(_: Run) -> nn.Module:
    """A model with tied and frozen parameters, and with buffers."""
    model = models.Tied()
    model.middle.requires_grad_(False)
    return Counting(model)


def _ignored(run: Run) -> nn.Module:
    """A model with parameters that DDP is told to ignore; they stay local."""
    model, names = run.mlp(), ["2.weight", "2.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


def _shared_storage(run: Run) -> nn.Module:
    """A model whose parameters are all views of one buffer."""
    return with_shared_storage(run.mlp().to(run.device))


def with_shared_storage(model: nn.Module) -> nn.Module:
    """Make all parameters of a model views of one flat tensor, and its statistics views of
    another."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.data = part.view_as(parameter)
    norms = [layer for layer in model.modules() if hasattr(layer, "running_mean")]
    names = [(layer, name) for layer in norms for name in ("running_mean", "running_var")]
    if names:
        statistics = torch.cat([getattr(layer, name) for layer, name in names])
        parts = statistics.split([getattr(layer, name).numel() for layer, name in names])
        for (layer, name), part in zip(names, parts, strict=True):
            setattr(layer, name, part)
    return model


class _SharedCounters(Exact, a=WIDTH, b=WIDTH, c=WIDTH, d=WIDTH):
    """Exact. Layers of the same shape, whose gradients cannot be told apart by it, each with a
    buffer that the forward writes: views of one tensor. The parameters are views of another
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name, part in zip(self.widths, torch.zeros(16).split(4), strict=True):
            self.register_buffer(f"count_{name}", part)
        with_shared_storage(self)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.widths:
            x = getattr(self, name)(x).relu()
            with torch.no_grad():
                getattr(self, f"count_{name}").add_(1)
        return x[:, :OUTPUTS]


# --- With branches that a step may leave out -----------------------------------------------------


@torch.compiler.disable
def _unseen(_: Tensor) -> None:
    """A hook that breaks the graph of a backward."""


class _BrokenBackward(Branching):
    """Exact. Branches after a hook that is not traced."""

    def forward(self, x: Tensor, takes: str) -> Tensor:
        out = super().forward(x.requires_grad_(), takes)
        out.register_hook(_unseen)
        return self.c(out.relu())[:, :OUTPUTS]


class _BrokenForward(Exact, first=WIDTH, unused=WIDTH, last=WIDTH, sometimes=WIDTH):
    """Exact. Layers in separate graphs; no rank uses one of them, and only some ranks use
    another."""

    def forward(self, x: Tensor, takes: str) -> Tensor:
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        if takes:
            y = self.sometimes(y).relu()
            torch._dynamo.graph_break()
        return self.last(y)[:, :OUTPUTS]


class _Dropping(Exact, first=WIDTH, last=OUTPUTS):
    """Exact. Blocks share a compiled forward, and a step skips some blocks, so the names in a graph
    belong to the parameters of another block. A hook that is not traced may break the loop."""

    blocks: Any

    def __init__(self, run: Run, *, has_hooks: bool = False) -> None:
        super().__init__(blocks=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.blocks = nn.ModuleList(map(run.compile, self.blocks))
        for block in self.blocks if has_hooks else ():
            block.register_forward_hook(torch.compiler.disable(lambda *args: args[2]))

    def forward(self, x: Tensor, takes: str) -> Tensor:
        y = self.first(x)
        for name, block in zip("abc", self.blocks, strict=True):
            if name in takes:
                y = block(y).relu()
        return self.last(y)


MODELS: Final[Mapping[str, Callable[[Run], nn.Module]]] = {
    "layers": Run.mlp,
    "two layers": lambda run: run.mlp(2),
    "five layers": lambda run: run.mlp(5),
    "tied": lambda _: models.Tied(),
    "layouts": lambda _: models.Layouts(),
    "scalars": lambda _: models.Shapes(),
    "complex": lambda _: models.Complex(),
    "two dtypes": lambda _: models.TwoDtypes(),
    "unusual": _unusual,
    "frozen": _frozen,
    "ignored": _ignored,
    "shared storage": _shared_storage,
    "shared counters": lambda _: _SharedCounters(),
    "checkpointed": lambda _: models.Checkpointed(),
    "counting": lambda run: Counting(run.mlp()),
    "normed": lambda _: nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(4)),
    "shifting": lambda run: _Shifting(run.mlp()),
    "broken": lambda run: _Broken(run.mlp()),
    "in parts": lambda _: InParts(),
    "disabled": lambda _: _Disabled(),
    "partly compiled": _partly_compiled,
    "compiled": lambda run: run.compile(run.mlp()),
    "branches": lambda _: Branching(outputs=OUTPUTS),
    "branches of several dtypes": lambda _: Branching(
        {"b": torch.bfloat16, "c": torch.float64}, OUTPUTS
    ),
    "broken backward": lambda _: _BrokenBackward(),
    "parts": lambda _: _BrokenForward(),
    "blocks": _Dropping,
    "a loop": lambda run: _Dropping(run, has_hooks=True),
}
