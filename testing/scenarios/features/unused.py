"""Parameters that take no part in a step, on some ranks or on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from testing.models import OUTPUTS, WIDTH, Batch, Branching, Exact, linear_loss
from testing.scenarios.loop import Style, Zero, backwards
from testing.scenarios.run import Run, synced_if

FIND_UNUSED: Final[Mapping[str, Any]] = {"find_unused_parameters": True}


@torch.compiler.disable
def _unseen(_: Tensor) -> None:
    """A hook that breaks the graph of a backward."""


class _BrokenBackward(Branching):
    """Exact. Branches behind a hook that is not traced."""

    def forward(self, x: Tensor, takes: str) -> Tensor:
        out = super().forward(x.requires_grad_(), takes)
        out.register_hook(_unseen)
        return self.c(out.relu())[:, :OUTPUTS]


class _BrokenForward(Exact, first=WIDTH, unused=WIDTH, last=WIDTH, sometimes=WIDTH):
    """Exact. Layers in graphs of their own, one of which no rank uses, and one only some."""

    def forward(self, x: Tensor, takes: str) -> Tensor:
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        if takes:
            y = self.sometimes(y).relu()
            torch._dynamo.graph_break()
        return self.last(y)[:, :OUTPUTS]


class _Dropping(Exact, first=WIDTH, last=OUTPUTS):
    """Exact. Blocks that share a compiled forward, some of which a step leaves out: the flags in a
    graph name the parameters of another block. A hook that is not traced may break the loop."""

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


class _Heads(Exact, first=WIDTH, a=OUTPUTS, b=OUTPUTS, c=OUTPUTS):
    """Exact. All of three outputs are computed, and some are used."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = {name: run.compile(layer) for name, layer in self.named_children()}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layers["first"](x).relu()
        return {name: self.layers[name](y) for name in "abc"}


MODELS: Final[Mapping[str, Callable[[Run], nn.Module]]] = {
    "branches": lambda _: Branching(outputs=OUTPUTS),
    "dtypes": lambda _: Branching({"b": torch.bfloat16, "c": torch.float64}, OUTPUTS),
    "broken backward": lambda _: _BrokenBackward(),
    "parts": lambda _: _BrokenForward(),
    "blocks": _Dropping,
    "a loop": lambda run: _Dropping(run, has_hooks=True),
}


def branches_of(takes: str) -> list[list[str]]:
    """The branches that each rank takes, by step: those of ``a/bc b``, of two steps, are ``a`` on
    rank 0 and ``bc`` on rank 1, and then ``b`` on both."""
    return [step.split("/") for step in takes.split(" ")]


def branching(
    run: Run,
    takes: str,
    *,
    style: Style = "outside",
    zero: Zero = "none",
    local: Sequence[int] = (),
    model: str | nn.Module = "branches",
    prepare: Callable[[Any], object] = lambda _: None,
    before_note: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> None:
    """Train a model with branches.

    Args:
        run: where gradients are noted.
        takes: the branches that each rank takes, as of :func:`branches_of`.
        style: as of a :class:`Loop`.
        zero: as of a :class:`Loop`.
        local: the steps that run under ``no_sync``, after which gradients stay.
        model: one of :data:`MODELS`, or another one with branches.
        prepare: called with the DDP module.
        before_note: called with it after each backward.
        options: of DDP, beside ``find_unused_parameters=True`` or in its place.
    """
    made = MODELS[model](run) if isinstance(model, str) else model
    ddp = run.ddp(made, **{**FIND_UNUSED, **options})
    prepare(ddp)
    forward = run.compile(ddp) if style == "outside" else ddp

    def step(batch: Batch, branches: str) -> None:
        linear_loss(forward, batch, branches).backward()

    backward = run.compile(step) if style == "inside" else step
    for number, each in enumerate(branches_of(takes)):
        synced = number not in local
        with synced_if(ddp, synced):
            backward(run.rows(number), each[dist.get_rank() % len(each)])
        before_note(ddp)
        run.note_backward(ddp, synced=synced)
        if synced and zero != "never":
            ddp.zero_grad(set_to_none=zero == "none")


def outputs_in_turn(run: Run, takes: str) -> None:
    """A loss uses some of the outputs, each from a layer of its own; the others' layers get no
    gradient, though the outputs reach them. Layers are compiled one by one: of a compiled forward
    an output that no loss uses gives zeros."""
    ddp = run.ddp(_Heads(run), **FIND_UNUSED)
    for number, each in enumerate(branches_of(takes)):
        ddp.zero_grad()
        outputs = ddp(run.rows(number)[0])
        sum(outputs[name].sum() for name in each[dist.get_rank() % len(each)]).backward()
        run.note_backward(ddp)


def outputs_apart(run: Run) -> None:
    """A backward of one output, and then of another. Eager DDP refuses that one: its sink has
    marked the other's parameters ready. It stays on its rank, as one of the wrapped module does."""
    ddp = run.ddp(_Heads(run), **FIND_UNUSED)
    inputs, _ = run.rows(0)
    outputs = ddp(inputs)
    outputs["a"].sum().backward(retain_graph=True)
    run.note_backward(ddp)
    (outputs if run.is_fused else ddp.module(inputs))["b"].sum().backward()
    run.note_backward(ddp, synced=False)


def compressed(run: Run, takes: str) -> None:
    """With ``fp16_compress_hook``."""
    hook = default_hooks.fp16_compress_hook
    branching(run, takes, prepare=lambda ddp: ddp.register_comm_hook(None, hook))


def in_a_static_graph_later(run: Run, takes: str) -> None:
    """With ``_set_static_graph`` after DDP is constructed."""
    branching(run, takes, prepare=lambda ddp: ddp._set_static_graph())


def by_instances(run: Run) -> None:
    """Two modules of one class share a forward, and one of their branches takes no part. First they
    take turns, then one backward is of both."""
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


class _Block(Exact, layer=WIDTH):
    """Exact."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class _OtherBlock(_Block):
    """It has a compiled forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * 1.0


class _Chain(nn.Module):
    """Blocks, each compiled, of which one can be left out."""

    def __init__(self, run: Run, kind: type[_Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.skipped = -1
        if run.way != "eager":
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
    """A module leaves out its first block, whose gradient comes last, on one rank, later on the
    other. Then comes the backward of another module on the same group."""
    before, chain = _Chain(run, _Block), _Chain(run, _OtherBlock)
    first = run.ddp(before, bucket_cap_mb=1e-4)
    both = _Chains(first, run.ddp(chain, bucket_cap_mb=1e-4, **FIND_UNUSED))
    for step in range(8):
        chain.skipped = 0 if step >= 3 and dist.get_rank() == step // 4 % 2 else -1
        backwards(run, both, both, 1, first=step)
