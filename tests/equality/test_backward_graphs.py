"""Which graph reduces the gradients of a backward, and that both give those of eager DDP.

Each case trains on two ranks with eager DDP and compiled under the flag, and says how many
backwards compiled autograd has traced meanwhile. Where AOTAutograd's backward reduces, there are
none.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.state import process_state
from tests.support.modes import in_turn

RUN = Callable[..., list[Any]]
Compile = Callable[[Any], Any]


def _chain(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)]
    return nn.Sequential(*layers).to(dtype)


def _inputs(step: int = 0, rows: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(rows, 4, generator=generator).to(dtype)


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding((x.abs() * 3).long().clamp(max=9))
        return self.inner(tokens) @ self.embedding.weight.t()


class _Doubled(DistributedDataParallel):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)


class _InParts(nn.Module):
    """Functions that are not compiled cut its forward in three. The weights in the middle lie in
    another order than their gradients are computed in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 36), nn.Linear(32, 4)
        self.middle = nn.Conv2d(2, 2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = _as_it_is(self.first(x)).reshape(-1, 1, 6, 6).expand(-1, 2, 6, 6)
        y = y.contiguous(memory_format=torch.channels_last)
        return self.last(_as_it_is(self.middle(y)).flatten(1))


@torch.compiler.disable
def _as_it_is(x: Tensor) -> Tensor:
    return x.relu()


def _steps(call: Any, model: nn.Module, count: int = 3, **kwargs: Any) -> list[Tensor | None]:
    seen = []
    for step in range(count):
        model.zero_grad()
        call(_inputs(step, **kwargs)).square().sum().backward()
        seen += _gradients(model)
    return seen


# --- Reduced in AOTAutograd's backward -----------------------------------------------------------


def plain(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())
    return _steps(compiled(ddp), ddp)


def backward_inside(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())

    @compiled
    def step(x: Tensor) -> None:
        ddp(x).square().sum().backward()

    seen = []
    for number in range(3):
        ddp.zero_grad()
        step(_inputs(number))
        seen += _gradients(ddp)
    return seen


def of_a_subclass(compiled: Compile) -> list[Any]:
    ddp = _Doubled(_chain())
    return _steps(compiled(ddp), ddp)


def around_what_is_compiled(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(compiled(_chain()))
    return _steps(ddp, ddp)


def tied(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_Tied())
    return _steps(compiled(ddp), ddp)


def in_float64(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain(torch.float64))
    return _steps(compiled(ddp), ddp, dtype=torch.float64)


def rows_that_differ(compiled: Compile) -> list[Any]:
    """Between steps, so that sizes become symbols, and between ranks, down to one."""
    ddp = DistributedDataParallel(_chain())
    call, seen = compiled(ddp), []
    for step, rows in enumerate((3, 4, 5, 1)):
        ddp.zero_grad()
        call(_inputs(step, rows + 2 * dist.get_rank())).square().sum().backward()
        seen += _gradients(ddp)
    return seen


def several_buckets(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain(), bucket_cap_mb=1e-4)
    return _steps(compiled(ddp), ddp)


def with_optimizer_and_scaler(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())
    call, optimizer = compiled(ddp), torch.optim.AdamW(ddp.parameters(), 1e-2)
    scaler, seen = torch.amp.GradScaler("cpu"), []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(_inputs(step)).float().square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        seen += _gradients(ddp)
        scaler.step(optimizer)
        scaler.update()
    return seen


def local_gradients(compiled: Compile) -> list[Any]:
    """Under ``no_sync``, and by ``autograd.grad``: the graph reduces, but not in these."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        for step in range(2):
            call(_inputs(step)).square().sum().backward()
            seen += _gradients(ddp)
    ddp.zero_grad()
    loss = call(_inputs(5)).square().sum()
    seen += torch.autograd.grad(loss, list(ddp.parameters()))
    return seen + _steps(call, ddp)


def with_the_flag_unset(compiled: Compile) -> list[Any]:
    """What was constructed and compiled under the flag goes on without it."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    with inductor_config.patch(ddp_fusion=None):
        seen += _steps(call, ddp, 2)
    return seen + _steps(call, ddp, 1)


def gradients_kept(compiled: Compile) -> list[Any]:
    """They are averaged with what comes, in the tensors that ``.grad`` was, as in eager DDP: what
    was accumulated, in a layout of its own; what some ranks and parameters have; zeros."""
    ddp = DistributedDataParallel(_chain(), bucket_cap_mb=2e-4)
    call, seen = compiled(ddp), []
    parameters = list(ddp.parameters())
    for step in range(6):
        with ddp.no_sync() if step in (0, 2) else torch.enable_grad():
            if step == 1:
                weight = parameters[0]
                weight.grad = weight.grad.t().contiguous().t()
            if step == 4:
                ddp.zero_grad(set_to_none=False)
            if step == 5 and dist.get_rank() == 0:
                parameters[1].grad = None
            before = [parameter.grad for parameter in parameters]
            call(_inputs(step)).square().sum().backward()
        kept = zip(parameters, before, strict=True)
        assert all(old is None or old is parameter.grad for parameter, old in kept)
        seen += _gradients(ddp)
    return seen


def gradients_kept_of_what_may_be_unused(compiled: Compile) -> list[Any]:
    """The flags, which say what was used, lie in a bucket too, and nothing is added to them."""
    ddp = DistributedDataParallel(_chain(), bucket_cap_mb=2e-4, find_unused_parameters=True)
    call, seen = compiled(ddp), []
    for step in range(4):
        with ddp.no_sync() if step % 2 == 0 else torch.enable_grad():
            call(_inputs(step)).square().sum().backward()
        seen += _gradients(ddp)
    ddp.zero_grad(set_to_none=False)
    call(_inputs(4)).square().sum().backward()
    return seen + _gradients(ddp)


def a_backward_fails(compiled: Compile) -> list[Any]:
    """Before and behind the graph that averages: gradients that there are stay the same tensors."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    before = [parameter.grad for parameter in ddp.parameters()]
    for fails_behind in (False, True):
        x = _inputs(1).requires_grad_()
        y = call(2 * x) if fails_behind else call(x)
        (x if fails_behind else y).register_hook(_fail)
        with pytest.raises(RuntimeError, match="a hook fails"):
            y.square().sum().backward()
        kept = zip(ddp.parameters(), before, strict=True)
        assert all(old is parameter.grad for parameter, old in kept)
    return seen  # Eager DDP cannot go on.


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("a hook fails")


def second_instance(compiled: Compile) -> list[Any]:
    """Dynamo has one graph for both, with the names of the first in its backward: they take turns,
    on groups of their own, one of them accumulates, and the first is freed."""
    groups = [dist.group.WORLD, dist.new_group()]
    modules = [DistributedDataParallel(_chain(), process_group=group) for group in groups]
    calls = [compiled(ddp) for ddp in modules]
    seen = []
    for number in (0, 1, 0, 1):
        seen += _steps(calls[number], modules[number], 1)
    for number in (0, 1):
        with modules[number].no_sync() if number else torch.enable_grad():
            calls[number](_inputs(7)).square().sum().backward()
    calls[1](_inputs(8)).square().sum().backward()
    seen += [*_gradients(modules[0]), *_gradients(modules[1])]
    del calls[0], modules[0]
    return seen + _steps(calls[0], modules[0], 2)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, opens: bool = True) -> Tensor:
        y, gate = self.first(x), self.gate(x)
        return y * gate.sigmoid() if opens else y * gate.detach()


def static_graph(compiled: Compile) -> list[Any]:
    """All parameters have gradients: what is promised of the graph says nothing more."""
    ddp = DistributedDataParallel(_Gated(), static_graph=True)
    call = compiled(ddp)
    seen = _steps(call, ddp)
    with ddp.no_sync():
        call(_inputs(4)).square().sum().backward()
    call(_inputs(5)).square().sum().backward()
    return seen + _gradients(ddp)


def in_parts(compiled: Compile) -> list[Any]:
    """Each graph launches its own part, and the next ones compute meanwhile."""
    ddp = DistributedDataParallel(_InParts(), bucket_cap_mb=2e-4)
    call = compiled(ddp)
    seen = _steps(call, ddp)
    with ddp.no_sync():
        call(_inputs(3)).square().sum().backward()
        seen += _gradients(ddp)
    before = [parameter.grad for parameter in ddp.parameters()]
    call(_inputs(4)).square().sum().backward()
    kept = zip(ddp.parameters(), before, strict=True)
    assert all(old is parameter.grad for parameter, old in kept)
    seen += _gradients(ddp)
    seen += torch.autograd.grad(call(_inputs(5)).square().sum(), list(ddp.parameters()))
    return seen + _steps(call, ddp, 1)


def instances_in_parts(compiled: Compile) -> list[Any]:
    """They share the graphs of each part, and take turns."""
    modules = [DistributedDataParallel(_InParts()) for _ in range(2)]
    calls, seen = [compiled(ddp) for ddp in modules], []
    for number in (0, 1, 0, 1):
        seen += _steps(calls[number], modules[number], 1)
    return seen


def fails_in_parts(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_InParts())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    before = [(parameter.grad, parameter.grad.clone()) for parameter in ddp.parameters()]
    x = _inputs(1).requires_grad_()
    y = call(2 * x)
    x.register_hook(_fail)
    with pytest.raises(RuntimeError, match="a hook fails"):
        y.square().sum().backward()
    for parameter, (old, value) in zip(ddp.parameters(), before, strict=True):
        assert parameter.grad is old
        seen.append(value)
    return seen


# --- Traced by compiled autograd -----------------------------------------------------------------


def kept_of_another_kind(compiled: Compile) -> list[Any]:
    """On one rank a gradient that there is belongs to a graph of autograd."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    for step in range(2):
        if dist.get_rank() == step:
            ddp.module[0].weight.grad = torch.ones(8, 4, requires_grad=True) * 2
        call(_inputs(step)).square().sum().backward()
        seen += [gradient.detach() for gradient in _gradients(ddp)]
    return seen


def static_graph_without_some(compiled: Compile) -> list[Any]:
    """One rank has no gradient of some parameters, which are inputs of its graph all the same."""
    seen = []
    for opens in (False, dist.get_rank() == 0):
        ddp = DistributedDataParallel(_Gated(), static_graph=True)
        call = compiled(ddp)
        for step in range(4):
            ddp.zero_grad()
            call(_inputs(step), opens).square().sum().backward()
            seen += _gradients(ddp)
    return seen


def _clamp(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.1, 0.1)


def hooks_of_users(compiled: Compile) -> list[Any]:
    """They see the gradient of this rank alone, and may change it."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    weight, bias = ddp.module[0].weight, ddp.module[0].bias
    handle = weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    bias.register_post_accumulate_grad_hook(_clamp)
    seen += _steps(call, ddp, 2)
    handle.remove()
    return seen + _steps(call, ddp, 1)


def hooks_on_one_rank(compiled: Compile) -> list[Any]:
    """One rank is traced where the others are not."""
    ddp = DistributedDataParallel(_chain())
    call, seen = compiled(ddp), []
    for step in range(5):
        ddp.zero_grad()
        handle = ddp.module[0].weight.register_hook(lambda gradient: 2 * gradient)
        if dist.get_rank() != step % 2:
            handle.remove()
        call(_inputs(step)).square().sum().backward()
        handle.remove()
        seen += _gradients(ddp)
    return seen


def with_another_flag(compiled: Compile) -> list[Any]:
    """What was compiled with the forward is fused as the flag has said then."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    with inductor_config.patch(ddp_fusion=FusionConfig(mode="coalesced", bucket_cap_mb=3)):
        seen += _steps(call, ddp, 1)
    return seen + _steps(call, ddp, 1)


def graph_retained(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    ddp.zero_grad()
    loss = call(_inputs(1)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return seen + _gradients(ddp)


def two_forwards(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    ddp.zero_grad()
    (call(_inputs(1)).square().sum() + call(_inputs(2)).exp().sum()).backward()
    return seen + _gradients(ddp)


def an_eager_part(compiled: Compile) -> list[Any]:
    """The loss reads a parameter, too."""
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    ddp.zero_grad()
    (call(_inputs(1)).square().sum() + ddp.module[0].weight.square().sum()).backward()
    return seen + _gradients(ddp)


def some_inputs(compiled: Compile) -> list[Any]:
    ddp = DistributedDataParallel(_chain())
    call = compiled(ddp)
    seen = _steps(call, ddp, 1)
    ddp.zero_grad()
    loss = call(_inputs(1)).square().sum()
    loss.backward(inputs=[ddp.module[0].weight], retain_graph=True)
    loss.backward(inputs=[p for p in ddp.parameters() if p is not ddp.module[0].weight])
    return seen + _gradients(ddp)


class _Blocks(nn.Module):
    """Blocks between layers, the first of which has its weight in common with what comes last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(_Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return self.last(y) @ self.first.weight


def block_by_block(compiled: Compile) -> list[Any]:
    """All blocks share a compiled forward. The layers around them are not compiled."""
    model = _Blocks()
    model.blocks = nn.ModuleList(map(compiled, model.blocks))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    seen = _steps(ddp, ddp)
    with ddp.no_sync():
        ddp(_inputs(3)).square().sum().backward()
        seen += _gradients(ddp)
    ddp(_inputs(4)).square().sum().backward()
    seen += _gradients(ddp)
    ddp.zero_grad(set_to_none=False)
    for rows in (5, 6 + dist.get_rank()):
        ddp(_inputs(5, rows)).square().sum().backward()
    return seen + _gradients(ddp)


class _Outside(nn.Module):
    """One of its layers is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._not_compiled(self.first(x)))

    @torch.compiler.disable
    def _not_compiled(self, x: Tensor) -> Tensor:
        return self.middle(x).relu()


def breaks_in_a_loop(compiled: Compile) -> list[Any]:
    """Dynamo leaves such a forward alone, and compiles what it calls."""
    model = _Blocks()
    for block in model.blocks:
        block.register_forward_hook(lambda *args: _as_it_is(args[2]))
    ddp = DistributedDataParallel(model)
    return _steps(compiled(ddp), ddp)


class _SharedByParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_as_it_is(self.first(x))) @ self.first.weight


def shared_by_parts(compiled: Compile) -> list[Any]:
    """A gradient comes from two graphs."""
    ddp = DistributedDataParallel(_SharedByParts())
    return _steps(compiled(ddp), ddp)


class _ByParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = _as_it_is(self.first(x))
        return y, self.second(y.detach())


def parts_one_by_one(compiled: Compile) -> list[Any]:
    """A backward for each part: none of them gives all gradients."""
    ddp = DistributedDataParallel(_ByParts())
    call, seen = compiled(ddp), []
    for step in range(3):
        ddp.zero_grad()
        for output in call(_inputs(step)):
            output.square().sum().backward()
        seen += _gradients(ddp)
    return seen


def instances_in_one_backward(compiled: Compile) -> list[Any]:
    """Their graph has the names of the first, and runs for both."""
    modules = [DistributedDataParallel(_chain()) for _ in range(2)]
    first, second = (compiled(ddp) for ddp in modules)
    seen = []
    for step in range(3):
        for ddp in modules:
            ddp.zero_grad()
        y, z = first(_inputs(step)).square().sum(), second(_inputs(step + 5)).exp().sum()
        if step == 0:  # Of the first alone: its names are prepared.
            y.backward()
            z.backward()
        else:
            (y + 2 * z).backward()
        seen += [*_gradients(modules[0]), *_gradients(modules[1])]
    return seen


def over_the_same_weights(compiled: Compile) -> list[Any]:
    """The module whose names are in the graph is gone."""
    model, seen = _chain(), []
    call = compiled(model)
    for _ in range(2):
        ddp = DistributedDataParallel(model)
        seen += _steps(lambda x, ddp=ddp: ddp.forward(x), ddp, 1)
        del ddp
        ddp = DistributedDataParallel(call)
        seen += _steps(ddp, model, 1)
        del ddp
        loss = call(_inputs(7)).square().sum()
        seen += torch.autograd.grad(loss, list(model.parameters()))
    return seen


def second_thread(compiled: Compile) -> list[Any]:
    groups = [dist.new_group() for _ in range(2)]
    models = [_chain(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
    modules = [
        DistributedDataParallel(copy.deepcopy(model), process_group=group)
        for model, group in zip(models, groups, strict=True)
    ]
    calls, failed = [compiled(module) for module in modules], []

    def train(number: int) -> None:
        try:
            _steps(calls[number], modules[number])
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads if dist.get_rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [*_gradients(modules[0]), *_gradients(modules[1])]


Graph = Literal["aot_autograd", "compiled_autograd"]

IN_AOT_AUTOGRAD: Final = (
    plain,
    backward_inside,
    of_a_subclass,
    around_what_is_compiled,
    tied,
    in_float64,
    rows_that_differ,
    several_buckets,
    with_optimizer_and_scaler,
    local_gradients,
    with_the_flag_unset,
    gradients_kept,
    gradients_kept_of_what_may_be_unused,
    a_backward_fails,
    second_instance,
    static_graph,
    in_parts,
    instances_in_parts,
    fails_in_parts,
    block_by_block,
    breaks_in_a_loop,
    instances_in_one_backward,
)
TRACED: Final = (
    kept_of_another_kind,
    hooks_of_users,
    hooks_on_one_rank,
    with_another_flag,
    graph_retained,
    two_forwards,
    an_eager_part,
    some_inputs,
    shared_by_parts,
    parts_one_by_one,
    static_graph_without_some,
)
EITHER: Final = (over_the_same_weights, second_thread)


@dataclass(frozen=True)
class Seen:
    """What a rank has seen of a case.

    Attributes:
        traced: how many backwards compiled autograd has traced.
        fused: whether the graphs have fewer collectives than gradients.
    """

    traced: int
    fused: bool


def compared(case: Callable[[Compile], list[Any]], mode: str, graph: str) -> Seen:
    """Run a case with eager DDP and under the flag; raise where they differ."""
    process_state.reset()
    want = case(lambda function: function)
    torch._dynamo.reset()
    counters.clear()
    config = FusionConfig(mode=mode, backward_graph=graph)  # type: ignore[arg-type]
    with inductor_config.patch(ddp_fusion=config):
        got = case(torch.compile)
        reports = fusion_passes.reports()
    assert len(got) == len(want)
    for number, (mine, its) in enumerate(zip(got, want, strict=True)):
        if its is None:
            assert mine is None, (number, mine)
            continue
        # Elements can be what is left of large ones that cancel each other.
        tolerance = 2e-2 if case is with_optimizer_and_scaler else 1e-5
        largest = float(its.abs().max())
        assert torch.allclose(mine, its, 0, tolerance * largest), (number, mine, its)
    before = sum(report.collectives_before for report in reports)
    fused = sum(report.collectives_after for report in reports) < before
    return Seen(counters["compiled_autograd"]["captures"], fused)


ON_EACH_TORCH: Final = (
    plain,
    backward_inside,
    rows_that_differ,
    local_gradients,
    gradients_kept,
    second_instance,
    hooks_of_users,
    graph_retained,
    in_parts,
)
"""What stands on torch's private parts most; other cases are of the package's own logic."""

_CRASH: Final = "torch 2.11 can crash where one thread is traced while another one runs"


@pytest.mark.parametrize(
    ("case", "mode"),
    in_turn(
        {case.__name__: case for case in (*IN_AOT_AUTOGRAD, *TRACED, *EITHER)},
        each_torch=[case.__name__ for case in ON_EACH_TORCH],
        skipped={second_thread.__name__: _CRASH} if torch.__version__ < "2.13" else {},
    ),
)
def test_gradients_are_those_of_eager_ddp(
    run_on_ranks: RUN, case: Callable[[Compile], list[Any]], mode: str
) -> None:
    for seen in run_on_ranks(2, compared, case=case, mode=mode, graph="auto"):
        if case in IN_AOT_AUTOGRAD:
            assert seen.traced == 0
        if case in TRACED:
            assert seen.traced > 0
        assert seen.fused or case in (several_buckets, some_inputs)


@pytest.mark.parametrize("case", [plain, local_gradients], ids=lambda c: c.__name__)
def test_one_graph_can_be_chosen(run_on_ranks: RUN, case: Callable[[Compile], list[Any]]) -> None:
    for graph, traces in (("aot_autograd", False), ("compiled_autograd", True)):
        for seen in run_on_ranks(2, compared, case=case, mode="concat", graph=graph):
            assert (seen.traced > 0) == traces


def goes_on_beside_its_launches(mode: str, has_outside: bool) -> None:
    """Rank 1 launches nothing before rank 0 has run all graphs, which launch the same."""
    others, word = dist.new_group(), torch.zeros(1)

    def hear(_: Tensor) -> None:
        dist.recv(word, 0, others)

    def tell(_: Tensor) -> None:
        dist.send(word, 1, others)

    want = DistributedDataParallel(_Outside() if has_outside else _InParts())
    want(_inputs(2)).square().sum().backward()
    with inductor_config.patch(ddp_fusion=mode):
        ddp = DistributedDataParallel(_Outside() if has_outside else _InParts())
        call = torch.compile(ddp)
        _steps(call, ddp, 2)  # The ranks meet in the first one.
        ddp.zero_grad()
        x = _inputs(2).requires_grad_()
        y = call(x)
        if dist.get_rank():
            y.register_hook(hear)
        else:
            x.register_hook(tell)
        y.square().sum().backward()
    for mine, its in zip(ddp.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    dist.destroy_process_group(others)


@pytest.mark.parametrize(
    ("mode", "has_outside"),
    [
        ("concat", False),
        ("coalesced", True),
        pytest.param("coalesced", False, marks=pytest.mark.nightly),
    ],
)
def test_a_graph_does_not_wait_for_what_was_launched_before(
    run_on_ranks: RUN, mode: str, has_outside: bool
) -> None:
    run_on_ranks(2, goes_on_beside_its_launches, mode=mode, has_outside=has_outside)


def no_trace(**settings: Any) -> int:
    """How many backwards are traced of a plain training with these options."""
    with inductor_config.patch(ddp_fusion=FusionConfig(**settings)):
        ddp = DistributedDataParallel(_chain())
        counters.clear()
        _steps(torch.compile(ddp), ddp, 1)
    return int(counters["compiled_autograd"]["captures"])


@pytest.mark.parametrize("settings", [{"scaling": "store"}, {"reduce_dtype": "bf16"}], ids=str)
def test_what_aot_autograd_must_not_reduce_is_traced(
    run_on_ranks: RUN, settings: dict[str, Any]
) -> None:
    assert all(run_on_ranks(2, no_trace, **settings))
