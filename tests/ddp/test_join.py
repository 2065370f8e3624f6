"""``join``: ranks that have run out of inputs take part in what the others reduce, and training is
that of eager DDP, fused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement import participant
from fusion_passes.agreement.rendezvous import meet
from testing import models
from testing.equality import tensor_difference
from tests.support import scenarios
from tests.support.modes import MODES, in_turn
from tests.support.scenarios import Compile, Values

RUN = Callable[..., list[Any]]
TENSORS = 6
"""How many parameters :func:`testing.models.mlp` has."""


@dataclass(frozen=True)
class Uneven:
    """A training with uneven inputs.

    Attributes:
        steps: how many inputs each rank has, for each time that ranks are joined.
        model: makes the wrapped module.
        join: options of ``join``.
        ddp: options of DDP.
        hook: a communication hook.
        local: whether each step has a backward under ``no_sync``, too.
        inside: whether the whole step is compiled.
        sizes: rows of the batches, in turn.
        takes: the branches that each rank takes, step by step, if the model has some.
    """

    steps: Sequence[Sequence[int]]
    model: Callable[[], nn.Module] = models.mlp
    join: dict[str, bool] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    local: bool = False
    inside: bool = False
    sizes: Sequence[int] = (4,)
    takes: Sequence[Sequence[tuple[int, ...]]] = ()

    def __call__(self, wrap: Compile) -> Values:
        """A scenario; its values are those of all steps that this rank has."""
        ddp = DistributedDataParallel(self.model(), **self.ddp)
        if self.hook is not None:
            ddp.register_comm_hook(None, self.hook)
        forward = ddp if self.inside else wrap(ddp)

        def step(x: Tensor, **branches: Any) -> None:
            forward(x, **branches).sum().backward()

        run: Any = wrap(step) if self.inside else step  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        values: Values = {}
        for time_joined, counts in enumerate(self.steps):
            with ddp.join(**self.join):
                for number in range(counts[dist.get_rank() % len(counts)]):
                    optimizer.zero_grad()
                    self._train(ddp, run, number)
                    for name, parameter in ddp.named_parameters():
                        gradient = None if parameter.grad is None else parameter.grad.sign()
                        values[f"{time_joined}.{number}: {name}"] = gradient
                        if gradient is not None:
                            parameter.grad = gradient  # Parameters stay whole numbers.
                    optimizer.step()
        return values | scenarios.state(ddp)

    def _train(self, ddp: DistributedDataParallel, run: Callable[..., None], number: int) -> None:
        x, branches = scenarios.batch(number, self.sizes[number % len(self.sizes)]), {}
        if self.takes:
            each = self.takes[number % len(self.takes)]
            branches["takes"] = each[dist.get_rank() % len(each)]
        if self.local:
            with ddp.no_sync():
                run(scenarios.batch(number + 100), **branches)
        run(x, **branches)


def halve_and_sum(_: object, bucket):
    """A communication hook that is no average over all ranks."""
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


UNUSED = Uneven(
    [[2, 5], [4, 2]],
    model=scenarios.Branches,
    ddp={"find_unused_parameters": True},
    takes=[[(0,), ()], [(), (0,)]],
)
CASES = {
    "some have more": Uneven([[2, 4]]),
    "rank 0 has more": Uneven([[4, 1]]),
    "one has none at all": Uneven([[0, 3]]),
    "divided by those that have inputs": Uneven(
        [[2, 4]], join={"divide_by_initial_world_size": False}
    ),
    "several times": Uneven([[1, 2], [3, 1], [2, 2]]),
    "several times, divided otherwise": Uneven(
        [[1, 2], [3, 1]], join={"divide_by_initial_world_size": False}
    ),
    "buffers": Uneven([[2, 4], [3, 1]], model=scenarios.Counting),
    "no_sync": Uneven([[1, 3]], local=True),
    "the whole step": Uneven([[2, 4]], inside=True),
    "other graphs": Uneven([[2, 5]], sizes=(4, 1, 3)),
    "several buckets": Uneven([[2, 4]], ddp={"bucket_cap_mb": 0.0005}),
    "a communication hook": Uneven([[2, 4]], hook=halve_and_sum),
    "unused parameters": UNUSED,
}
BY_NIGHT = {
    "more unused parameters": replace(UNUSED, takes=[[(0,), (1,)], [(), (0,)], [(0, 1), ()]])
}


def compare(outcomes: Sequence[scenarios.Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.eager.keys() == outcome.flagged.keys()
        for name, value in outcome.flagged.items():
            eager = outcome.eager[name]
            if value is None and eager is not None:
                # Eager DDP's joined ranks say that they have used what any has used before.
                eager = eager if eager.any() else None
            difference = tensor_difference(value, eager, 0.0)
            assert not difference, f"rank {rank}, {name}: {difference}"


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *in_turn(CASES, each_torch=["some have more", "buffers", "unused parameters"]),
        *(
            pytest.param(case, mode, marks=pytest.mark.nightly, id=f"{name}-{mode}")
            for name, case in BY_NIGHT.items()
            for mode in MODES
        ),
    ],
)
def test_as_eager_ddp(run_on_ranks: RUN, case: Uneven, mode: str) -> None:
    outcomes = run_on_ranks(2, scenarios.run_both_ways, scenario=case, flag=mode)
    compare(outcomes)
    for outcome in outcomes:
        assert outcome.warned == []
    with_inputs = [out for out, count in zip(outcomes, case.steps[0], strict=True) if count]
    for outcome in with_inputs:
        assert len(outcome.fused) >= TENSORS


@pytest.mark.xdist_group("four ranks")
@pytest.mark.parametrize("initial", [True, False])
def test_four_ranks(run_on_ranks: RUN, initial: bool) -> None:
    case = Uneven([[1, 2, 4, 4]], join={"divide_by_initial_world_size": initial})
    compare(run_on_ranks(4, scenarios.run_both_ways, scenario=case, flag="concat"))


@pytest.mark.xdist_group("four ranks")
def test_the_divisor(run_on_ranks: RUN) -> None:
    outcomes = run_on_ranks(4, divided, initial=False)
    for rank, gradients in enumerate(outcomes):
        assert gradients == [1.0] * [1, 2, 4, 4][rank]
    outcomes = run_on_ranks(4, divided, initial=True)
    for rank, gradients in enumerate(outcomes):
        assert gradients == [1.0, 0.75, 0.5, 0.5][: [1, 2, 4, 4][rank]]


def divided(initial: bool) -> list[float]:
    """The gradients of a weight whose gradient is 1 on each rank that has inputs."""
    gradients = []
    with torch._inductor.config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        compiled = torch.compile(ddp)
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range([1, 2, 4, 4][dist.get_rank()]):
                ddp.zero_grad()
                compiled(torch.ones(1, 1)).sum().backward()
                gradients.append(round(float(ddp.module.weight.grad), 5))
    return gradients


def test_nothing_is_agreed_on_anew(run_on_ranks: RUN) -> None:
    for meetings in run_on_ranks(2, meetings_in_steps):
        assert not any(meetings[1:])


def meetings_in_steps() -> list[int]:
    """How often the ranks meet, in each step and in those without inputs."""
    count, counts = 0, []

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return meet(*args)

    with (
        torch._inductor.config.patch(ddp_fusion="concat"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(participant, "meet", counting)
        ddp = DistributedDataParallel(models.mlp())
        compiled = torch.compile(ddp)
        with ddp.join():
            for step in range(2 + 2 * dist.get_rank()):
                compiled(scenarios.batch(step)).sum().backward()
                counts.append(count)
                count = 0
        counts.append(count)
    return counts


def test_an_error_where_one_runs_out_first(run_on_ranks: RUN) -> None:
    case = Uneven([[1, 3]], join={"throw_on_early_termination": True})
    ended, warned = run_on_ranks(2, words_of_error, case=case)
    assert "Rank 0 exhausted all inputs" in ended
    assert "at least one rank that exhausted inputs" in warned


def words_of_error(case: Uneven) -> str:
    """What a training under the flag raises."""
    with torch._inductor.config.patch(ddp_fusion="concat"), pytest.raises(RuntimeError) as caught:
        case(torch.compile)
    return str(caught.value)


class Fails(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def test_an_error_reaches_those_without_inputs(run_on_ranks: RUN) -> None:
    (ended, seconds), (failed, _) = run_on_ranks(2, fail_without_others)
    assert "no gradient today" in failed
    assert "failed on rank 1: ValueError: no gradient today" in ended
    assert seconds < 20


def fail_without_others() -> tuple[str, float]:
    """What a rank raises when the one with inputs fails in its first backward, and after how many
    seconds."""
    start = time.monotonic()

    def run() -> None:
        ddp = DistributedDataParallel(models.mlp())
        compiled = torch.compile(ddp)
        with ddp.join():
            if dist.get_rank() == 1:
                Fails.apply(compiled(scenarios.batch(9))).sum().backward()

    with (
        torch._inductor.config.patch(ddp_fusion="concat"),
        pytest.raises((ValueError, RuntimeError)) as caught,
    ):
        run()
    return str(caught.value), time.monotonic() - start


def test_a_static_graph_is_handed_over(run_on_ranks: RUN) -> None:
    case = Uneven([[2, 4]], ddp={"static_graph": True})
    outcomes = run_on_ranks(2, scenarios.run_both_ways, scenario=case, flag="concat")
    compare(outcomes)
    for outcome in outcomes:
        (warned,) = outcome.warned
        assert "it joins ranks with uneven inputs, and has static_graph=True" in warned


@dataclass(frozen=True)
class WithShardedOptimizer:
    """Joined with another joinable: the optimizer of torch that shards its state."""

    def __call__(self, wrap: Compile) -> Values:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ddp = DistributedDataParallel(models.mlp())
        compiled = wrap(ddp)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
        with Join([ddp, optimizer]):
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                compiled(scenarios.batch(step)).sum().backward()
                for parameter in ddp.parameters():
                    assert parameter.grad is not None
                    parameter.grad.sign_()
                optimizer.step()
        return scenarios.state(ddp)


def test_beside_another_joinable(run_on_ranks: RUN) -> None:
    case = WithShardedOptimizer()
    outcomes = run_on_ranks(2, scenarios.run_both_ways, scenario=case, flag="concat")
    compare(outcomes)
    for outcome in outcomes:
        assert outcome.warned == []
        assert len(outcome.fused) == TENSORS
