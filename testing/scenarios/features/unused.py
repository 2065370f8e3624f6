"""Parameters that take no part in a step, on some ranks or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from testing.models import OUTPUTS, WIDTH, Batch, Branching, fill_whole, linear_loss
from testing.scenarios.loop import Loop, Style, train
from testing.scenarios.run import Run, synced_if


class Branches(nn.Module):
    """Exact. A layer in the middle that is left out where ``skips`` is set."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.middle, self.last = layers[0], layers[2], layers[4]
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if not self.skips:
            x = self.middle(x).relu()
        out: Tensor = self.last(x)
        return out


def _train_branches(
    run: Run,
    skips: Callable[[int], bool],
    loop: Loop | None = None,
    **options: Any,
) -> None:
    """Train :class:`Branches`, leaving out the layer in the steps where ``skips`` says so."""
    model = Branches(run.mlp())
    loop = loop or Loop()
    ddp = run.ddp(model, **options)

    def choose(step: int) -> None:
        model.skips = skips(step)

    train(
        run,
        ddp,
        Loop(style=loop.style, steps=4, zero=loop.zero, before_step=choose),
    )


def on_all_ranks(run: Run) -> None:
    """The layer is never used."""
    _train_branches(run, lambda _: True, find_unused_parameters=True)


def on_all_ranks_kept(run: Run) -> None:
    """The layer is not used in every other step, and gradients are kept."""
    _train_branches(run, lambda step: step % 2 == 1, Loop(zero="kept"), find_unused_parameters=True)


def on_one_rank(run: Run, **loop: Any) -> None:
    """The layer is never used on rank 1: it gets the average with nothing."""
    rank = dist.get_rank()
    _train_branches(run, lambda _: rank == 1, Loop(**loop), find_unused_parameters=True)


def on_changing_ranks(run: Run) -> None:
    """The layer is left out on another rank in each step, and in the last step on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _train_branches(
        run, lambda step: step == 3 or step % ranks == rank, find_unused_parameters=True
    )


def all_used(run: Run) -> None:
    """The option is set, and everything is used."""
    _train_branches(run, lambda _: False, find_unused_parameters=True)


def skipped_reduction(run: Run) -> None:
    """``skip_all_reduce_unused_params`` with a layer that no rank uses."""
    _train_branches(
        run, lambda _: True, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )


def frozen(run: Run) -> None:
    """A layer whose parameters need no gradient."""
    model = run.mlp()
    model[2].requires_grad_(False)
    train(run, run.ddp(model))


def missing_on_one_rank(run: Run) -> None:
    """A gradient is missing on rank 1 from the start, and no option allows it."""
    rank = dist.get_rank()
    _train_branches(run, lambda _: rank == 1)


# --- One of several branches ---------------------------------------------------------------------

CHANGING = [
    ["a", "b"],
    ["b", "a"],
    ["a", "a"],
    ["b", "b"],
    ["abc", "a"],
    ["a", "c"],
    ["c", "a"],
    ["b", "b"],
    ["a", "b"],
    ["", "c"],
]
"""The branches that each rank takes, step by step."""


def train_branching(
    run: Run,
    takes: Sequence[Sequence[str]],
    *,
    style: Style = "outside",
    zero: Literal["none", "kept", "never"] = "none",
    local: Sequence[int] = (),
    model: nn.Module | None = None,
    prepare: Callable[[Any], object] = lambda _: None,
    before_note: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> None:
    """Train :class:`testing.models.Branching`.

    Args:
        run: where gradients are noted.
        takes: the branches that each rank takes, step by step.
        style: as of a :class:`Loop`.
        zero: as of a :class:`Loop`.
        local: the steps that run under ``no_sync``, after which gradients stay.
        model: another one with branches.
        prepare: called with the DDP module.
        before_note: called with it after each backward.
        options: of DDP.
    """
    model = model or Branching(outputs=OUTPUTS)
    ddp = run.ddp(model, find_unused_parameters=True, **options)
    prepare(ddp)
    forward = run.compile(ddp) if style == "outside" else ddp

    def step(batch: Batch, branches: str) -> None:
        (forward(batch[0], branches) * batch[1]).sum().backward()

    backward = run.compile(step) if style == "inside" else step
    for number, each in enumerate(takes):
        synced = number not in local
        with synced_if(ddp, synced):
            backward(run.rows(number), each[dist.get_rank() % len(each)])
        before_note(ddp)
        run.note_backward(ddp, synced=synced)
        if synced and zero != "never":
            ddp.zero_grad(set_to_none=zero == "none")


def changing(run: Run, steps: int, **options: Any) -> None:
    """Ranks take one of two branches, the same or not, and after four steps any."""
    train_branching(run, CHANGING[:steps], **options)


def a_new_branch(run: Run) -> None:
    """All ranks take another branch for some steps."""
    train_branching(run, [["a"], ["a"], ["c"], ["c"], ["c"], ["a"], ["a"]])


def added(run: Run) -> None:
    """Gradients are added to from step to step."""
    takes = [["a", "b"], ["b", "a"], ["a"], ["b"], ["a", "b"]]
    if dist.get_world_size() == 4:
        takes = [["a", "b", "c", ""], ["", "a", "b", "c"], ["a", "a", "b", "b"], ["", "", "", "c"]]
    train_branching(run, takes, zero="never")


def added_to_some(run: Run) -> None:
    """The same where a branch comes late."""
    train_branching(run, [["a"], ["c", "b"], ["a", "b"], ["", "c"]], zero="never")


def zeroed(run: Run) -> None:
    """Gradients are set to zero and kept."""
    takes = [["a", "b"], ["b", "a"], ["a"], ["c", "b"], ["a"]]
    train_branching(run, takes, zero="kept")


def with_no_sync(run: Run) -> None:
    """Some steps are under ``no_sync``, with branches of their own."""
    takes = [["a", "b"], ["b"], ["a"], ["b"], ["a"], ["a"]]
    train_branching(run, takes, local=(0, 1, 3))


def compressed(run: Run) -> None:
    """With ``fp16_compress_hook``."""
    hook = default_hooks.fp16_compress_hook
    train_branching(run, CHANGING[:6], prepare=lambda ddp: ddp.register_comm_hook(None, hook))


def several_dtypes(run: Run) -> None:
    """Branches of several dtypes."""
    dtypes = {"b": torch.bfloat16, "c": torch.float64}
    train_branching(run, CHANGING[:6], model=Branching(dtypes, OUTPUTS))


def in_a_static_graph(run: Run) -> None:
    """With ``static_graph``, and another branch on each rank."""
    train_branching(run, [["a", "b"]] * 4, static_graph=True)


def in_a_static_graph_later(run: Run) -> None:
    """The same with ``_set_static_graph`` after DDP is constructed."""
    train_branching(run, [["a", "b"]] * 4, prepare=lambda ddp: ddp._set_static_graph())


@torch.compiler.disable
def _unseen(_: Tensor) -> None:
    """A hook that breaks the graph of a backward."""


class _BrokenBackward(Branching):
    """Exact. Branches behind a hook that is not traced."""

    def forward(self, x: Tensor, takes: str) -> Tensor:
        out = super().forward(x.requires_grad_(), takes)
        out.register_hook(_unseen)
        return self.c(out.relu())[:, :OUTPUTS]


def in_several_graphs(run: Run) -> None:
    """A hook breaks the backward in several graphs; ranks take other branches."""
    train_branching(run, CHANGING[:5], style="as it is", model=_BrokenBackward())


class _BrokenForward(nn.Module):
    """Exact. Layers in graphs of their own, one of which no rank uses, and one only some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        fill_whole(self)

    def forward(self, x: Tensor, takes: str) -> Tensor:
        y = self.first(x).relu()
        torch._dynamo.graph_break()
        if takes:
            y = self.sometimes(y).relu()
            torch._dynamo.graph_break()
        return self.last(y)[:, :OUTPUTS]


def in_parts(run: Run) -> None:
    """A forward in several graphs: each sends its part. First all ranks use the same, then one
    does not, then all again."""
    takes = [["a"], ["a"], [""], ["a"], ["a", ""], ["", ""], ["a"], ["a"]]
    train_branching(run, takes, model=_BrokenForward())


def in_equal_parts(run: Run) -> None:
    """The same where ranks always use the same."""
    train_branching(run, [["a"]] * 4, model=_BrokenForward())


class _Dropping(nn.Module):
    """Exact. Blocks that share a compiled forward, some of which a step leaves out."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        fill_whole(self)
        self.blocks = nn.ModuleList(map(run.compile, self.blocks))

    def forward(self, x: Tensor, takes: str) -> Tensor:
        y = self.first(x)
        for name, block in zip("abc", self.blocks, strict=True):
            if name in takes:
                y = block(y).relu()
        out: Tensor = self.last(y)
        return out


def in_shared_parts(run: Run) -> None:
    """The flags in a graph name the parameters of another block. First all ranks use all blocks,
    under ``no_sync`` once, then they leave out the same ones."""
    takes = [["abc"]] * 4 + [["ac"], ["ac"], ["c"]]
    train_branching(run, takes, style="as it is", local=(1,), model=_Dropping(run))


def in_shared_parts_with_zeros(run: Run) -> None:
    """The same with gradients that are kept, in a loop whose graph break cuts the forward."""
    model = _Dropping(run)
    for block in model.blocks:
        block.register_forward_hook(torch.compiler.disable(lambda *args: args[2]))
    takes = [["abc"], ["abc"], ["ab"], ["ab"], ["abc"]]
    train_branching(run, takes, zero="kept", model=model)


def in_other_shared_parts(run: Run) -> None:
    """The same where ranks leave out others at times."""
    takes = [["abc"], ["abc"], ["ab", "abc"], ["abc"], ["a", "c"], ["abc"], ["b", ""], ["abc"]]
    train_branching(run, takes, style="as it is", model=_Dropping(run))


def in_shared_parts_of_others(run: Run) -> None:
    """The same where no two ranks ever use the same: when they meet first, a later block comes from
    another rank than an earlier one, and one comes from none. A block that all leave out for long
    comes back, as the last of a backward and as the first."""
    takes = [["b", "ac"], ["bc", "a"], ["abc", "b"], ["ab", "c"], ["a", "bc"], ["ac", "ab"]]
    takes += [["b", "c"]] * 10 + [["abc", "b"], ["c", "ab"]]
    takes += [["b", "a"]] * 10 + [["c", "ab"], ["abc", "b"], ["bc", "ac"]]
    train_branching(run, takes, style="as it is", model=_Dropping(run))


def by_instances(run: Run) -> None:
    """Two modules of one class share a forward, and one of their layers takes no part. First they
    take turns, then one backward is of both."""
    models = [Branches(run.mlp()) for _ in range(2)]
    for model in models:
        model.skips = True
    modules = [run.ddp(model, find_unused_parameters=True) for model in models]
    calls = [run.compile(ddp) for ddp in modules]
    for step in range(5):
        for ddp in modules:
            ddp.zero_grad()
        losses = [linear_loss(call, run.rows(step, n)) for n, call in enumerate(calls)]
        for loss in [losses[0] + losses[1]] if step > 2 else losses:
            loss.backward()
        for ddp in modules:
            run.note_backward(ddp)


class _Block(nn.Module):
    """Exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        fill_whole(self)

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


def in_parts_beside_another(run: Run) -> None:
    """A module leaves out its first block, whose gradient comes last, on one rank, later on the
    other. Then comes the backward of another module on the same group."""
    before, chain = _Chain(run, _Block), _Chain(run, _OtherBlock)
    first = run.ddp(before, bucket_cap_mb=1e-4)
    second = run.ddp(chain, bucket_cap_mb=1e-4, find_unused_parameters=True)
    both = nn.Sequential(first, second)
    for step in range(8):
        chain.skipped = 0 if step >= 3 and dist.get_rank() == step // 4 % 2 else -1
        both.zero_grad()
        inputs, factors = run.rows(step)
        (both(inputs)[:, :OUTPUTS] * factors).sum().backward()
        run.note_backward(both)
