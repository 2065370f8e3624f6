"""What a reducer does on ranks: where gradients are stored, what is launched, and what is said."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from fusion_passes.reducer.reducer import reducer_of
from testing import models

RUN = Callable[..., list[Any]]
CAP_MB = 300 / 2**20


@dataclass
class Steps:
    """What came of some steps on a rank.

    Attributes:
        stored: how many gradients compiled backwards have stored in their buckets, in each step.
        collectives: of the module's group, in each step.
        buckets: the numbers of the parameters of each.
        keys: of the group's store that a step has added.
        error: by how much a gradient differs from eager DDP's at most.
        compiled: graphs of compiled autograd.
    """

    stored: list[int] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    buckets: list[tuple[int, ...]] = field(default_factory=list)
    keys: int = 0
    error: float = 0.0
    traced: int = 0


@contextlib.contextmanager
def flag(**options: Any) -> Iterator[None]:
    value = FusionConfig(**options)
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(ddp_fusion=value):
        yield


def sequence_number() -> int:
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def run_steps(ddp: Any, eager: Any, step: Callable[[Any, int], Tensor], count: int = 4) -> Steps:
    """Train both, with the same data, and without an optimizer."""
    steps, store = Steps(), dist.group.WORLD.get_group_store()
    before = store.num_keys()
    compiled = torch.compile(ddp)
    for number in range(count):
        ddp.zero_grad()
        eager.zero_grad()
        step(eager, number).backward()
        launched = sequence_number()
        step(compiled, number).backward()
        steps.collectives.append(sequence_number() - launched)
        steps.stored.append(reducer_of(ddp).num_stored)
        pairs = zip(ddp.parameters(), eager.parameters(), strict=True)
        steps.error = max(steps.error, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))
    steps.buckets = [bucket.numbers for bucket in reducer_of(ddp).layout.buckets]
    dist.barrier()
    steps.keys = store.num_keys() - before
    steps.traced = counters["compiled_autograd"]["captures"]
    return steps


def pair(model: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """A module under the flag, and the same with eager DDP."""
    with inductor_config.patch(ddp_fusion=None):
        eager = DistributedDataParallel(model())
    ddp = DistributedDataParallel(model(), **options)
    ddp.load_state_dict(eager.state_dict())
    return ddp, eager


def rows(number: int, size: int = 4, width: int = models.WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(-3, 4, (size, width), generator=generator).float()


def other_batch_sizes() -> Steps:
    """Rank 1 has a batch of one in each third step, and another graph for it."""
    with flag(bucket_cap_mb=CAP_MB, first_bucket_cap_mb=CAP_MB):
        ddp, eager = pair(lambda: models.mlp(3))

        def step(model: Any, number: int) -> Tensor:
            size = 1 if dist.get_rank() == 1 and number % 3 == 2 else 4
            return model(rows(number, size)).sum()

        return run_steps(ddp, eager, step, 6)


ROUND = 16
"""Gradients of such sizes are aligned wherever they lie: graphs that are compiled before the layout
store them in place whatever else is in their bucket."""


class Breaking(nn.Module):
    """Exact. Breaks its graph on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(ROUND, ROUND) for _ in range(4)]
        self.first = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        self.second = nn.Sequential(layers[2], nn.ReLU(), layers[3])
        models.fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return self.second(x)


def breaks_on_one_rank() -> Steps:
    with flag():
        ddp, eager = pair(Breaking)
        return run_steps(ddp, eager, lambda model, number: model(rows(number, width=ROUND)).sum())


def eager_layers_between() -> Steps:
    """The first half is compiled, the other one is not: they share a bucket."""
    with flag():
        ddp, eager = pair(Breaking)
        ddp.module.second.forward = torch.compiler.disable(ddp.module.second.forward)
        return run_steps(ddp, eager, lambda model, number: model(rows(number, width=ROUND)).sum())


def several_forwards() -> Steps:
    """Three forwards of other rows, and on rank 1 of a batch of one, which another graph runs."""
    with flag(bucket_cap_mb=CAP_MB, first_bucket_cap_mb=CAP_MB):
        ddp, eager = pair(lambda: models.mlp(3))

        def step(model: Any, number: int) -> Tensor:
            sizes = (4, 4, 1 if dist.get_rank() == 1 and number > 1 else 4)
            parts = [model(rows(10 * number + n, size)).sum() for n, size in enumerate(sizes)]
            return torch.stack(parts).sum()

        return run_steps(ddp, eager, step, 5)


@pytest.mark.each_torch
@pytest.mark.parametrize(
    "job", [other_batch_sizes, breaks_on_one_rank, eager_layers_between, several_forwards]
)
def test_ranks_with_other_graphs_launch_the_same_buckets(
    run_on_ranks: RUN, job: Callable[[], Steps]
) -> None:
    one, other = run_on_ranks(2, job)
    assert one.buckets == other.buckets
    assert one.collectives == other.collectives
    # The broadcast of the layout comes on top in the first step.
    assert one.collectives == [len(one.buckets) + 1, *[len(one.buckets)] * (len(one.stored) - 1)]
    for rank in (one, other):
        assert rank.error == 0
        assert rank.keys == 0
        assert rank.traced == 0
        total = sum(len(bucket) for bucket in rank.buckets)
        wanted = 4 if job is eager_layers_between else total
        assert rank.stored == [0, *[wanted] * (len(rank.stored) - 1)]


def second_module() -> list[int]:
    """A second module of a class, after the first was compiled, and blocks of one class."""
    with flag():
        first, second = (DistributedDataParallel(models.mlp(3)) for _ in range(2))
        for ddp in (first, second):
            compiled = torch.compile(ddp)
            for number in range(2):
                ddp.zero_grad()
                compiled(rows(number)).sum().backward()
        stored = [reducer_of(ddp).num_stored for ddp in (first, second)]
        return [*stored, counters["stats"]["unique_graphs"]]


def test_instances_share_a_compiled_forward(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, second_module) == [[6, 6, 1], [6, 6, 1]]


def buckets_after_zero_grad() -> int:
    """How many tensors of a bucket's size, which no other has, outlive its gradients."""
    with flag():
        ddp = DistributedDataParallel(models.mlp(3, 7))
        compiled = torch.compile(ddp)
        for number in range(3):
            ddp.zero_grad()
            compiled(rows(number)).sum().backward()
        (bucket,) = reducer_of(ddp).layout.buckets
        ddp.zero_grad()
        gc.collect()
        tensors = [item for item in gc.get_objects() if type(item) is Tensor]
        return sum(tensor.numel() == bucket.numel for tensor in tensors)


def test_buckets_are_freed_with_their_gradients(run_on_ranks: RUN) -> None:
    assert run_on_ranks(2, buckets_after_zero_grad) == [0, 0]
