"""Communication hooks are called with our buckets, and gradients are those of eager DDP."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.equality import tensor_difference
from testing.scenarios.features.buffers import Counting

RUN = Callable[..., list[Any]]
Hook = tuple[Any, Callable[..., Any]]
"""A state, and a hook."""


def summing(state, bucket):  # DDP compares annotations, which must be no strings.
    """Sum, and note what came: neither an average, nor done in place."""
    shapes = [parameter.shape for parameter in bucket.parameters()]
    assert shapes == [gradient.shape for gradient in bucket.gradients()]
    state.append((bucket.index(), bucket.is_last(), shapes))
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda future: 2 * future.value()[0])


def bf16(state, bucket):  # Eager DDP refuses torch's name for it where there is no NCCL.
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)


def post_local() -> post_localSGD_hook.PostLocalSGDState:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return post_localSGD_hook.PostLocalSGDState(None, alone[dist.get_rank()], 2)


def alone() -> dist.ProcessGroup:
    groups: Any = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


HOOKS: dict[str, Callable[[], Hook]] = {
    "summing": lambda: ([], summing),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16": lambda: (None, bf16),
    "power": lambda: (power_sgd(), powerSGD_hook.powerSGD_hook),
    "fp16 power": lambda: (
        power_sgd(),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post local": lambda: (post_local(), post_localSGD_hook.post_localSGD_hook),
    "another group": lambda: (alone(), default_hooks.allreduce_hook),
}
ROUNDS = {"power": 64.0, "fp16 power": 2.0**14}
"""How far gradients may be off where products are summed in another order."""


class Wide(nn.Module):
    """Exact. Parameters of several dtypes and layouts, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.factor = nn.Parameter(torch.empty(models.WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(torch.empty(models.WIDTH, 2, dtype=torch.complex64))
        self.across = nn.Parameter(torch.empty(models.WIDTH, models.WIDTH).t())
        models.fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() @ self.across
        out: Tensor = (x * self.factor).sum() + (x * self.phase.sum(1)).real.sum().double()
        return out


def counting() -> nn.Module:
    return Counting(models.mlp())


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        hook: of :data:`HOOKS`.
        style: what is compiled under the flag: the module, or the step.
        local: the steps that run under ``no_sync``, after which gradients are kept.
        sizes: of the batches, in turn.
        unset_from: the step before which the flag is unset.
        options: of DDP.
        takes: the branches that each rank takes, step by step, of ``Branching``.
    """

    hook: str = "summing"
    style: Literal["forward", "step"] = "forward"
    model: Callable[[], nn.Module] = models.mlp
    local: Sequence[int] = ()
    sizes: Sequence[int] = (4,)
    steps: int = 4
    zero: bool = False
    unset_from: int = 100
    autocast: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    takes: Sequence[Sequence[str]] = ()


@dataclass
class Training:
    """What came of a case on a rank: gradients after each step, what :func:`summing` was given in
    each, the warnings, and the numbers of gradients in the buckets of each report."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    seen: list[list[Any]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    buckets: list[list[int]] = field(default_factory=list)


def train(case: Case, flag: str | None) -> Training:
    """Train one case; a job for every rank."""
    import fusion_passes
    from fusion_passes.state import process_state

    torch._dynamo.reset()
    process_state.reset()
    training = Training()
    known = len(fusion_passes.reports())
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inductor_config.ddp_fusion = flag
        stack.callback(setattr, inductor_config, "ddp_fusion", None)
        ddp = DistributedDataParallel(case.model(), **case.options)
        state, hook = HOOKS[case.hook]()
        ddp.register_comm_hook(state, hook)
        call = torch.compile(ddp) if flag and case.style == "forward" else ddp

        def step(x: Tensor, *takes: str) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = call(x, *takes).sum()
            loss.backward()

        if flag and case.style == "step":
            step = torch.compile(step)
        for number in range(case.steps):
            if number == case.unset_from:
                inductor_config.ddp_fusion = None
            _step(case, ddp, step, number)
            training.gradients.append({n: _copy(p.grad) for n, p in ddp.named_parameters()})
            if isinstance(state, list):
                training.seen.append(state[:])
                state.clear()
            if number not in case.local:
                for parameter in ddp.parameters():
                    parameter.grad = torch.zeros_like(parameter) if case.zero else None
    training.warned = [
        str(w.message) for w in caught if issubclass(w.category, fusion_passes.FusionWarning)
    ]
    reports = fusion_passes.reports()[known:]
    training.buckets = [[len(b.parameters) for b in report.buckets] for report in reports]
    return training


def _step(case: Case, ddp: Any, step: Callable[..., None], number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    size = case.sizes[number % len(case.sizes)]
    x = torch.randint(-1, 2, (size, models.WIDTH), generator=generator).float()
    torch.manual_seed(number)
    with ddp.no_sync() if number in case.local else contextlib.nullcontext():
        if case.takes:
            takes = case.takes[number % len(case.takes)]
            step(x, takes[dist.get_rank() % len(takes)])
        else:
            step(x)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def train_both_ways(case: Case, flag: str) -> tuple[Training, Training]:
    return train(case, flag), train(case, None)


def _in_dtype_of(gradient: Tensor | None, eager: Tensor | None) -> Tensor | None:
    """Eager DDP leaves a parameter that this rank has not used the hook's result as it is, in the
    compressed dtype; ours has the parameter's."""
    return eager.to(gradient.dtype) if gradient is not None and eager is not None else eager


def check(run_on_ranks: RUN, case: Case, flag: str = "concat", ranks: int = 2) -> list[Training]:
    """What came of the case on each rank under the flag, with the gradients of eager DDP."""
    results = run_on_ranks(ranks, train_both_ways, case=case, flag=flag)
    for ours, eager in results:
        for step, (have, want) in enumerate(zip(ours.gradients, eager.gradients, strict=True)):
            for name, gradient in want.items():
                value = _in_dtype_of(have[name], gradient) if case.takes else gradient
                difference = tensor_difference(have[name], value, ROUNDS.get(case.hook, 0.0))
                assert not difference, f"step {step}, {name}: {difference}"
        assert [len(calls) for calls in eager.seen] == [len(calls) for calls in ours.seen] or (
            "bucket_cap_mb" in case.options
        )
        for calls in filter(None, ours.seen):
            assert [index for index, _, _ in calls] == list(range(len(calls)))
            assert [is_last for _, is_last, _ in calls] == [False] * (len(calls) - 1) + [True]
        assert len({str(calls) for calls in ours.seen if calls}) <= 1
    return [ours for ours, _ in results]


BY_NIGHT = ("noop", "bf16", "fp16 power")
ON_EACH_TORCH = ("summing", "power")
"""Other hooks are called alike."""


def _marks(hook: str) -> list[Any]:
    return [
        *([pytest.mark.nightly] if hook in BY_NIGHT else []),
        *([pytest.mark.each_torch] if hook in ON_EACH_TORCH else []),
    ]


@pytest.mark.parametrize("hook", [pytest.param(hook, marks=_marks(hook)) for hook in HOOKS])
def test_gradients_are_those_of_eager_ddp(run_on_ranks: RUN, hook: str) -> None:
    for training in check(run_on_ranks, Case(hook)):
        assert training.warned == []
        assert training.buckets == [[6]]


@pytest.mark.parametrize("hook", ["summing", pytest.param("power", marks=pytest.mark.nightly)])
def test_coalesced(run_on_ranks: RUN, hook: str) -> None:
    for training in check(run_on_ranks, Case(hook, style="step"), "coalesced"):
        assert training.warned == []
        assert training.buckets == [[6]]


LOOPS = {
    "step": Case(style="step"),
    "no_sync": Case(local=(0, 1, 3), steps=6),
    "no_sync in a step": Case(style="step", local=(0, 2), steps=5),
    "gradients of zeros": Case(zero=True),
    "autocast": Case(autocast=True),
    "other batch sizes": Case(sizes=(4, 6, 3), steps=6),
    "several buckets": Case(options={"bucket_cap_mb": 0.0003}),
    "flag unset": Case(unset_from=2),
    "frozen": Case(model=models.partly_frozen),
    "tied": Case(model=models.Tied),
    "buffers": Case(model=counting),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(run_on_ranks: RUN, name: str) -> None:
    for training in check(run_on_ranks, LOOPS[name]):
        expected = {"flag unset": 1}.get(name, 0)
        assert len(training.warned) == expected, training.warned
        assert training.buckets
        assert name != "several buckets" or len(training.buckets[0]) > 1


UNUSED = Case(
    model=models.Branching,
    options={"find_unused_parameters": True},
    takes=[["ab", "ab"], ["a", "b"], ["b", "a"], ["c", "c"], ["a", "a"], ["", "b"]],
    steps=6,
)
IN_TURN = replace(UNUSED, takes=[["a", "b"], ["b", "a"], ["a", "a"], ["b", "b"]])
"""Two graphs instead of five, where what is used is not the subject."""


@pytest.mark.parametrize(
    ("hook", "flag"),
    [
        ("summing", "concat"),
        ("fp16", "coalesced"),
        pytest.param("another group", "concat", marks=pytest.mark.each_torch),
        pytest.param("summing", "coalesced", marks=pytest.mark.nightly),
        pytest.param("fp16", "concat", marks=pytest.mark.nightly),
        pytest.param("another group", "coalesced", marks=pytest.mark.nightly),
    ],
)
def test_unused_parameters(run_on_ranks: RUN, hook: str, flag: str) -> None:
    case = UNUSED if hook == "summing" else IN_TURN
    for training in check(run_on_ranks, replace(case, hook=hook), flag):
        assert training.warned == []
        assert sorted(training.buckets[0]) == [1, 10], "which were used is sent beside the hook"
        gradients = [g for step in training.gradients for g in step.values() if g is not None]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}


UNUSED_LOOPS = {
    "step": replace(IN_TURN, style="step"),
    "no_sync": replace(IN_TURN, local=(1, 3)),
    "gradients of zeros": replace(UNUSED, zero=True),
    "several buckets": replace(IN_TURN, options={**UNUSED.options, "bucket_cap_mb": 0.0003}),
    "all": replace(UNUSED, takes=[["abc"]]),
}


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "no_sync",
        "several buckets",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gradients of zeros", "all")),
    ],
)
def test_loops_with_unused_parameters(run_on_ranks: RUN, name: str) -> None:
    for training in check(run_on_ranks, UNUSED_LOOPS[name]):
        assert training.warned == []
        assert training.buckets


def test_power_sgd_with_unused_parameters(run_on_ranks: RUN) -> None:
    """Its products depend on the order of a bucket's gradients, which is not eager DDP's here. It
    makes NaN of a gradient that is zero on all ranks, and of that parameter's later ones."""
    case = replace(UNUSED, hook="power", takes=[["a", "bc"], ["abc", "c"], ["bc", "a"]])
    first, second = run_on_ranks(2, train, case=case, flag="concat")
    assert first.warned == second.warned == []
    for ours, other in zip(first.gradients, second.gradients, strict=True):
        for name, value in ours.items():
            assert value is not None
            assert value.isfinite().all()
            assert tensor_difference(value, other[name], 0.0) is None


@pytest.mark.parametrize(
    "flag", [pytest.param("concat", marks=pytest.mark.each_torch), "coalesced"]
)
def test_parameters_of_several_kinds(run_on_ranks: RUN, flag: str) -> None:
    for training in check(run_on_ranks, Case(model=Wide), flag):
        assert [sorted(buckets) for buckets in training.buckets] == [[1, 1, 3]]


def test_several_buckets_of_power_sgd(run_on_ranks: RUN) -> None:
    """Its callbacks launch collectives, which come in one order on all ranks: with eager DDP over
    Gloo they do not, and the processes crash."""
    case = Case("power", options={"bucket_cap_mb": 0.0003}, steps=6)
    first, second = run_on_ranks(2, train, case=case, flag="concat")
    assert len(first.buckets[0]) > 1
    for ours, other in zip(first.gradients, second.gradients, strict=True):
        for name, value in ours.items():
            assert tensor_difference(value, other[name], 0.0) is None


@pytest.mark.xdist_group("four ranks")
def test_four_ranks(run_on_ranks: RUN) -> None:
    for hook in ("summing", "power"):
        check(run_on_ranks, Case(hook), ranks=4)
