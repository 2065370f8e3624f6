"""DDP modules that share compiled code or a backward, and other kinds of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.models import linear_loss
from testing.scenarios.features.backwards import note_grad
from testing.scenarios.features.models import InParts
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run, synced_if
from testing.threads import run_at_once


class _Named(DistributedDataParallel):
    """Overrides some attributes of a managed module, and calls DDP's methods by its name."""

    calls: tuple[str, ...] = ()

    def forward(self, *args: Any) -> Any:
        return 3 * DistributedDataParallel.forward(self, *args)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls = (*self.calls, "pre")
        return super()._pre_forward(*inputs, **kwargs)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        self.calls = (*self.calls, hook.__name__)
        super().register_comm_hook(state, hook)


def subclass(run: Run) -> None:
    """A user's subclass of DDP; compiled and uncompiled."""
    ddp = _Named(run.mlp(2).to(run.device))
    run.manage(ddp)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for number, forward in enumerate((run.compile(ddp), ddp)):
        output = forward(run.rows(0)[0])
        run.note_values(**{f"output {number}": output})
        backwards(run, ddp, forward, 1)
    assert isinstance(ddp, _Named)
    assert {"allreduce_hook", "pre"} <= set(ddp.calls)
    run.note("name", type(ddp).__name__)


def replicated(run: Run) -> None:
    """Train a model with ``replicate``."""
    model: Any = run.mlp().to(run.device)
    replicate(model)
    forward = run.compile(model)
    backwards(run, model, forward, 1)
    run.manage(replicate.state(model)._ddp)  # The first forward creates it.
    backwards(run, model, forward, 2, first=1)


# --- Several modules in a step -------------------------------------------------------------------

PAIRS = (((0, 1), (2, 3)), ((0, 2), (1, 3)))
"""Two ways to divide four ranks into groups of two."""


def two_groups(run: Run, **loop: Any) -> None:
    """Two modules, each over different pairs of ranks."""
    made = [[dist.new_group(list(pair)) for pair in pairs] for pairs in PAIRS]
    rank = dist.get_rank()
    first = run.ddp(run.mlp(2, models.WIDTH), process_group=made[0][rank // 2])
    second = run.ddp(run.mlp(2), process_group=made[1][rank % 2])
    train(run, nn.Sequential(first, nn.ReLU(), second), **loop)


def one_before_the_other(run: Run) -> None:
    """Two modules over the same group. The first is trained alone before both are compiled into one
    graph, as in a GAN: it already has buckets then, and the second has none."""
    first, second = run.ddp(run.mlp(2, models.WIDTH)), run.ddp(run.mlp(2))
    forward = run.compile(first)
    for step in range(2):
        forward(run.rows(step)[0]).sum().backward()
        run.note_backward(first)
    train(run, nn.Sequential(first, nn.ReLU(), second))


def two_caps(run: Run) -> None:
    """Two modules that are first compiled into one graph; one has its own cap and gets several
    buckets."""
    first = run.ddp(run.mlp(3, models.WIDTH))
    second = run.ddp(run.mlp(), bucket_cap_mb=300 / 2**20)
    train(run, nn.Sequential(first, nn.ReLU(), second), style="inside")


def alternating(run: Run) -> None:
    """Two modules with their own optimizers and backwards, as in a GAN, trained in alternating
    steps."""
    modules = [run.ddp(run.mlp()) for _ in range(2)]
    for ddp in modules * 2:
        train(run, ddp, steps=1)


# --- Graphs in common ----------------------------------------------------------------------------


def second_instance(run: Run) -> None:
    """Two instances for which Dynamo has one graph, whose backward has the names of the first. They
    alternate, on groups of their own; one of them accumulates, and the first is freed."""
    groups = [dist.group.WORLD, dist.new_group()]
    modules = [run.ddp(run.mlp(2), process_group=group) for group in groups]
    calls = [run.compile(ddp) for ddp in modules]
    for number in (0, 1, 0, 1):
        backwards(run, modules[number], calls[number], 1)
    for number in (0, 1):
        with synced_if(modules[number], number == 0):
            linear_loss(calls[number], run.rows(7)).backward()
    linear_loss(calls[1], run.rows(8)).backward()
    for ddp in modules:
        run.note_backward(ddp)
    del ddp, calls[0], modules[0]
    backwards(run, modules[0], calls[0], 2)


def instances_in_parts(run: Run) -> None:
    """Two instances that share the graphs of each part, and alternate."""
    modules = [run.ddp(InParts()) for _ in range(2)]
    calls = [run.compile(ddp) for ddp in modules]
    for number in (0, 1, 0, 1):
        backwards(run, modules[number], calls[number], 1)


def instances_in_one_backward(run: Run) -> None:
    """Two instances in one backward: the shared graph has the names of the first, and runs for
    both."""
    modules = [run.ddp(run.mlp(2)) for _ in range(2)]
    first, second = (run.compile(ddp) for ddp in modules)
    for step in range(3):
        for ddp in modules:
            ddp.zero_grad()
        y = linear_loss(first, run.rows(step))
        z = linear_loss(second, run.rows(step, 5))
        if step == 0:  # A backward of the first instance alone, so that its names are prepared.
            y.backward()
            z.backward()
        else:
            (y + 2 * z).backward()
        for ddp in modules:
            run.note_backward(ddp)


def over_the_same_weights(run: Run) -> None:
    """Two DDP modules over the same weights: the module whose names are in the graph is gone."""
    model = run.mlp(2)
    forward = run.compile(model)
    for number in range(2):
        ddp = run.ddp(model)
        backwards(run, ddp, ddp.forward, 1)
        del ddp
        ddp = run.ddp(forward)
        backwards(run, ddp, ddp, 1)
        del ddp
        note_grad(run, model, linear_loss(forward, run.rows(7)), f"{number}: ")


def over_the_same_weights_at_once(run: Run) -> None:
    """Two DDP modules over the same weights: each is called in turn, and averages for both."""
    model = run.mlp(2)
    modules = [run.ddp(model) for _ in range(2)]
    forwards = [run.compile(ddp) for ddp in modules]
    for step in range(4):
        model.zero_grad()
        linear_loss(forwards[step % 2], run.rows(step)).backward()
        run.note_backward(modules[0])


def in_a_thread(run: Run) -> None:
    """A training in a thread other than the main one, including the constructor."""

    def train() -> None:
        ddp, forward = run.compiled(run.mlp(2))
        backwards(run, ddp, forward)

    run_at_once([train])


def threads(run: Run) -> None:
    """Two modules on their own groups, each trained in a thread that sees the flag; one rank starts
    the threads in the other order."""
    _train_in_threads(run, run_at_once)


def bare_threads(run: Run) -> None:
    """:func:`threads` with threads that do not see torch's options (from torch 2.13 on)."""
    with ThreadPoolExecutor(2) as pool:
        _train_in_threads(
            run, lambda functions: [f.result() for f in list(map(pool.submit, functions))]
        )


def _train_in_threads(run: Run, run_all: Callable[[Sequence[Callable[[], None]]], object]) -> None:
    groups = [dist.new_group() for _ in range(2)]
    modules = [
        run.ddp(run.mlp(depth), process_group=group)
        for depth, group in zip((3, 2), groups, strict=True)
    ]
    calls = [run.compile(ddp) for ddp in modules]

    def train(number: int) -> None:
        for step in range(3):
            modules[number].zero_grad()
            linear_loss(calls[number], run.rows(step, number)).backward()

    order = (0, 1) if dist.get_rank() else (1, 0)
    run_all([functools.partial(train, number) for number in order])
    for ddp in modules:
        run.note_backward(ddp)


# --- Beside what is not fused --------------------------------------------------------------------


def _of_own_reducer(run: Run) -> DistributedDataParallel:
    """A module that DDP's own reducer trains; its gradients are not in buckets of the package."""
    ddp = DistributedDataParallel(models.mlp().to(run.device))
    ddp._register_buffer_comm_hook(None, lambda _, __: [])  # There are no buffers.
    return ddp


def two_reducers(run: Run) -> None:
    """A module that can be fused, and a module that DDP's own reducer trains."""
    first, second = run.ddp(models.mlp(outputs=models.WIDTH)), _of_own_reducer(run)
    both = nn.ModuleDict({"fused": first, "other": second})
    calls = run.compile(first), run.compile(second)
    backwards(run, both, lambda x: calls[1](calls[0](x)))


def reducers_apart(run: Run) -> None:
    """Such two modules, one after the other."""
    for ddp in (_of_own_reducer(run), run.ddp(models.mlp())):
        backwards(run, ddp, run.compile(ddp))
