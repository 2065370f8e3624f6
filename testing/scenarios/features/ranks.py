"""Ranks that do not do the same: batches, hooks, branches; and errors, which equal eager DDP's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, Branching, Checkpointed, Exact
from testing.scenarios.features.backwards import must_raise
from testing.scenarios.features.parts import Gated
from testing.scenarios.loop import Zero, backwards
from testing.scenarios.run import Run


def batch_sizes(run: Run) -> None:
    """Batch sizes that differ between ranks and steps, down to one, from the first step on."""
    ddp, forward = run.compiled(run.mlp(2))
    for step, sizes in enumerate(((3, 1), (3, 3), (4, 1), (1, 1), (1, 5))):
        backwards(run, ddp, forward, 1, first=step, size=sizes[dist.get_rank()])


def hooks_on_one_rank(run: Run) -> None:
    """A hook on a parameter of one rank, on a different one in each step, and on none in some
    steps."""
    ddp, forward = run.compiled(run.mlp(2))
    for step in range(5):
        handle = ddp.module[0].weight.register_hook(lambda gradient: 2 * gradient)
        if dist.get_rank() != step % 2:
            handle.remove()
        backwards(run, ddp, forward, 1, first=step)
        handle.remove()


class _Layers(Exact):
    """Exact. Layers that run in the order of their numbers."""

    def __init__(self, count: int = 2, outputs: int = WIDTH) -> None:
        super().__init__(layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
        self._outputs = outputs

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        for number in numbers:
            x = self.layers[number](x).relu()
        return x[:, : self._outputs]


ORDERS = ((2, 1, 0), (0, 1, 2))
"""Orders of three layers; the outer ones change places."""


def other_orders(run: Run) -> None:
    """Ranks use the same parameters in different orders."""
    ddp, forward = run.compiled(_Layers(3, OUTPUTS), bucket_cap_mb=1e-4)
    for step in range(4):
        backwards(run, ddp, forward, 1, *ORDERS[(dist.get_rank() + step) % 2], first=step)


def recompilation(run: Run) -> None:
    """From the third step on, all ranks use the parameters in another order."""
    ddp, forward = run.compiled(_Layers(3, OUTPUTS))
    for step in range(4):
        backwards(run, ddp, forward, 1, *ORDERS[step < 2], first=step)


class _Both(nn.Module):
    """A module after another one."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, first: tuple[int, ...], second: tuple[int, ...]) -> Tensor:
        return self.second(self.first(x, *first), *second)


FIRST_CASES = ((False, 1, 0), (True, 0, 2))


def other_orders_of_two(run: Run, *, are_others: bool = False) -> None:
    """Two modules over the same group in one backward; one of them uses its parameters in a
    different order on each rank, in two cases or in all others. A case is whether both are compiled
    separately, which module it is, and in which step that begins."""
    cases = itertools.product((False, True), (0, 1), (0, 2))
    for apart, swapped, begin in (c for c in cases if (c not in FIRST_CASES) == are_others):
        modules = [run.ddp(_Layers(3, n), bucket_cap_mb=1e-4) for n in (WIDTH, OUTPUTS)]
        both = _Both(*(map(run.compile, modules) if apart else modules))
        forward: Any = both if apart else run.compile(both)
        for step in range(5):
            changes = step >= begin and (dist.get_rank() + step) % 2 == 1
            orders = [ORDERS[not (changes and number == swapped)] for number in range(2)]
            backwards(run, both, forward, 1, *orders, first=step)


class _InTurn(nn.Module):
    """Layers of two modules in alternation."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, *order: int) -> Tensor:
        for number, mine in enumerate(order):
            x = self.second(self.first(x, mine), number)
        return x[:, :OUTPUTS]


def other_orders_of_instances(run: Run) -> None:
    """Two modules of one class, one after the other, whose layers sometimes change places."""
    for _ in range(2):
        ddp = run.ddp(_Layers())
        forward: Any = run.compile(_InTurn(ddp, _Layers().to(run.device)))
        _train_in_orders(run, ddp, forward)


class _Blocks(nn.Module):
    """Blocks that share the forwards of both orders."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Layers() for _ in range(2))
        if run.is_fused:
            for block in self.blocks:
                block.compile()

    def forward(self, x: Tensor, *order: int) -> Tensor:
        for block in self.blocks:
            x = block(x, *order)
        return x[:, :OUTPUTS]


def other_orders_of_blocks(run: Run) -> None:
    """Blocks that are compiled separately, and whose layers change places."""
    ddp = run.ddp(_Blocks(run))
    _train_in_orders(run, ddp, ddp)


def _train_in_orders(run: Run, ddp: nn.Module, forward: Any) -> None:
    for step in range(5):
        order = (1, 0) if (dist.get_rank() + step) % 2 else (0, 1)
        backwards(run, ddp, forward, 1, *order, first=step)


# --- Static graphs -------------------------------------------------------------------------------


def static_graph_without_some(run: Run) -> None:
    """One rank, or each, has no gradient for some parameters, although these are inputs of its
    graph."""
    for opens in (False, dist.get_rank() == 0):
        ddp, forward = run.compiled(Gated(OUTPUTS), static_graph=True)
        backwards(run, ddp, forward, 4, opens)


def static_graph_of_sides(run: Run) -> None:
    """Ranks run different branches of a static graph, or the same one; traced and untraced."""
    for takes in ("ab"[dist.get_rank()], "a"):
        for stances in (["default"] * 3, ["force_eager"] * 3, ["force_eager", "default"] * 2):
            ddp, forward = run.compiled(Branching(outputs=OUTPUTS), static_graph=True)
            for step, stance in enumerate(stances):
                zero: Zero = "kept" if step == 1 else "none"
                with torch.compiler.set_stance(stance):
                    backwards(run, ddp, forward, 1, takes, first=step, zero=zero)


# --- Errors --------------------------------------------------------------------------------------


def _note_first_error(run: Run, label: str, step: Callable[[int], object]) -> None:
    """Record in which of four steps an error is raised, and its subject. Gradients that eager DDP
    leaves before the error are not compared."""
    for number in range(4):
        try:
            step(number)
        except RuntimeError as error:
            run.note(label, [number, *_words_of(str(error))])
            return
    run.note(label, "no error")


def _words_of(text: str) -> list[str]:
    start = "Expected to have finished reduction in the prior iteration"
    indices = text.partition("did not receive grad for rank")[2]
    is_unused = "indices" in text and indices
    return [text[: len(start)], "unused" if is_unused else text.partition("set to True")[0]]


def static_graph_that_changes(run: Run) -> None:
    """It uses parameters that its first iteration did not use, or fewer; traced and untraced."""
    changes = ["a a b a", "a ab a a", "ab ab a ab"]
    for stance, lists in (("default", changes), ("force_eager", changes[:1])):
        for takes in lists:
            _, forward = run.compiled(Branching(outputs=OUTPUTS), static_graph=True)

            def step(number: int, forward: Any = forward, takes: str = takes) -> None:
                forward(run.rows(0)[0], takes.split()[number]).sum().backward()

            with torch.compiler.set_stance(stance):
                _note_first_error(run, f"{takes}, {stance}", step)


def unreached(run: Run, *, is_inside: bool = False) -> None:
    """Layers without a gradient on all ranks, without an option that allows it."""
    ddp = run.ddp(Branching(outputs=OUTPUTS))
    forward = ddp if is_inside else run.compile(ddp)

    def step(x: Tensor) -> None:
        forward(x, "a").sum().backward()

    compiled = run.compile(step) if is_inside else step
    _note_first_error(run, "error", lambda _: compiled(run.rows(0)[0]))


def unreached_later(run: Run) -> None:
    """A normal step, and then only a gradient penalty of a forward that is not compiled: on no rank
    does it reach the last bias."""
    ddp, forward = run.compiled(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
    )

    def step(number: int) -> None:
        inputs, factors = run.rows(number)
        if number != 1:
            (forward(inputs) * factors).sum().backward()
            return
        outputs = ddp(inputs.requires_grad_())
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        slope.square().sum().backward()

    _note_first_error(run, "error", step)


def unreached_at_first(run: Run) -> None:
    """Parameters that a nested backward reaches count as unused before it."""
    ddp = run.ddp(Checkpointed(reentrant=True), find_unused_parameters=True)
    backward = ddp(run.rows(0)[0]).sum().backward
    must_raise("expected to mark a variable ready only once", backward)


def _local_backwards(run: Run, ddp: Any) -> None:
    """Run two backwards, and record the gradients of the parameters that the model has now."""
    forward = run.compile(ddp)
    for step in range(2):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        dtype = ddp.module[0].weight.dtype
        (forward(inputs.to(dtype)) * factors).sum().backward()
        run.note_backward(ddp.module)


def all_replaced(run: Run) -> None:
    """A conversion replaces all parameters after DDP was constructed: nobody averages their
    gradients."""
    ddp = run.ddp(run.mlp(2))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        ddp.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    _local_backwards(run, ddp)


def thawed(run: Run) -> None:
    """A layer is unfrozen after DDP was constructed: nobody averages its gradients."""
    model = run.mlp(2)
    model[0].requires_grad_(False)
    ddp = run.ddp(model)
    _local_backwards(run, ddp)
    model[0].requires_grad_(True)
    _local_backwards(run, ddp)


def swapped(run: Run) -> None:
    """A parameter is replaced after DDP was constructed: DDP does not know its gradient."""
    model = run.mlp(2)
    ddp = run.ddp(model)
    model[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=run.device))
    forward = run.compile(ddp)
    _note_first_error(run, "error", lambda _: forward(run.rows(0)[0]).sum().backward())
