"""Parameters that are unused in a step, on some ranks or on all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, Batch, Branching, Exact, linear_loss, square_loss
from testing.scenarios.features.backwards import must_raise
from testing.scenarios.features.loops import wrapped
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run

FIND_UNUSED: Final[Mapping[str, Any]] = {"find_unused_parameters": True}


class Heads(Exact, first=WIDTH, a=OUTPUTS, b=OUTPUTS, c=OUTPUTS):
    """Exact. All three outputs are computed, and some are used. Layers are compiled one by one, so
    that a backward from one output reaches no other layer."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = {name: run.compile(layer) for name, layer in self.named_children()}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layers["first"](x).relu()
        return {name: self.layers[name](y) for name in "abc"}


def _loss_of(model: nn.Module, batch: Batch, takes: str) -> Tensor:
    outputs = model(batch[0])
    return sum((outputs[name].sum() for name in takes), torch.zeros(()))


def outputs_in_turn(run: Run, takes: str) -> None:
    """A loss uses some of the outputs, each from its own layer; the layers of the others get no
    gradient, although the outputs reach them. Layers are compiled one by one, because an unused
    output of a compiled forward gives zeros."""
    ddp = run.ddp(Heads(run), **FIND_UNUSED)
    train(run, ddp, style="as it is", takes=takes, loss=_loss_of, moves=False)


def outputs_apart(run: Run) -> None:
    """A backward of one output, and then of another. Eager DDP refuses the second one, because its
    sink has marked the other's parameters ready. Under the flag, its gradients stay local, as
    without DDP."""
    ddp = run.ddp(Heads(run), **FIND_UNUSED)
    inputs, _ = run.rows(0)
    outputs = ddp(inputs)
    outputs["a"].sum().backward(retain_graph=True)
    run.note_backward(ddp)
    (outputs if run.is_fused else ddp.module(inputs))["b"].sum().backward()
    run.note_backward(ddp, synced=False)


def in_a_static_graph_later(run: Run, takes: str) -> None:
    """``_set_static_graph`` after DDP is constructed."""
    ddp = wrapped(run, "branches", ddp=FIND_UNUSED)
    ddp._set_static_graph()
    train(run, ddp, takes=takes, moves=False)


def wrapped_hook(run: Run, takes: str) -> None:
    """``fp16_compress_wrapper``. For a parameter that this rank did not use, eager DDP leaves the
    hook's result in the smaller dtype; under the flag, it has the parameter's dtype."""

    def widen(ddp: nn.Module, _: bool) -> None:
        for parameter in ddp.parameters():
            if not run.is_fused and parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    ddp = wrapped(run, "branches", ddp=FIND_UNUSED, hook="wrapped in fp16")
    train(run, ddp, takes=takes, moves=False, before_note=widen)


def by_instances(run: Run) -> None:
    """Two modules of one class share a forward, and one of their branches is unused. First they
    alternate, then one backward reaches both."""
    modules = [run.ddp(Branching(outputs=OUTPUTS), **FIND_UNUSED) for _ in range(2)]
    calls = [run.compile(ddp) for ddp in modules]
    for step in range(5):
        for ddp in modules:
            ddp.zero_grad()
        losses = [linear_loss(call, run.rows(step, n), "ab") for n, call in enumerate(calls)]
        for loss in [losses[0] + losses[1]] if step > 2 else losses:
            loss.backward()
        for ddp in modules:
            run.note_backward(ddp)


def incomplete_twice(run: Run) -> None:
    """A second backward repeats an incomplete one, of the same output or of another: DDP refuses it
    immediately, and not only in the next forward. Gradients that it leaves are not compared."""
    for number, second in enumerate("ab"):
        ddp = run.ddp(Heads(run))
        x = run.rows(number)[0]
        outputs = ddp(x)
        outputs["a"].square().sum().backward(retain_graph=True)
        words = "expected to mark a variable ready only once"
        must_raise(words, outputs[second].square().sum().backward)
        try:
            ddp(x)
        except RuntimeError:  # Eager DDP's is an internal assertion.
            continue
        raise AssertionError("the next forward must be refused too")


class _Recurrent(nn.Module):
    """A weight that is read in each of two time steps gets a gradient from both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x.view(x.shape[0], 2, 4))
        result: Tensor = self.head(output.reshape(x.shape[0], 8))
        return result


def one_may_lack_gradients(run: Run) -> None:
    """Two modules are in one backward, and their graphs launch before other graphs have run."""
    first = run.ddp(nn.Linear(WIDTH, 8))
    second = run.ddp(_Recurrent(), **FIND_UNUSED)
    both = nn.Sequential(run.compile(first), run.compile(second))
    train(run, both, style="as it is", loss=square_loss, steps=2, moves=False)


class _Block(Exact, layer=WIDTH):
    """Exact. A block with a compiled forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class _OtherBlock(_Block):
    """A block with a compiled forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * 1.0


class _Chain(nn.Module):
    """Compiled blocks, one of which can be skipped."""

    def __init__(self, run: Run, kind: type[_Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.skipped = -1
        if run.is_fused:
            for block in self.blocks:
                block.compile()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x)
        return x


class _Chains(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :OUTPUTS]


def in_parts_beside_another(run: Run) -> None:
    """A module skips its first block, whose gradient comes last, on one rank, later on the other.
    Then the backward of another module on the same group follows."""
    before, chain = _Chain(run, _Block), _Chain(run, _OtherBlock)
    first = run.ddp(before, bucket_cap_mb=1e-4)
    both = _Chains(first, run.ddp(chain, bucket_cap_mb=1e-4, **FIND_UNUSED))
    for step in range(8):
        chain.skipped = 0 if step >= 3 and dist.get_rank() == step // 4 % 2 else -1
        backwards(run, both, both, 1, first=step)
