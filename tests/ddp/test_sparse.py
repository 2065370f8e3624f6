"""Sparse embeddings, in tests that need no other rank. The catalogue of scenarios compares
trainings with eager DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionWarning
from fusion_passes.config import FusionMode
from fusion_passes.reducer.reducer import reducer_of
from testing.scenarios.features.sparse import ROWS, Tables
from tests.support import fake_world

WIDTH = 4


class _Tied(nn.Module):
    """Exact. A table that a dense layer uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids) @ self.table.weight
        return out


class _Called(nn.Module):
    """Exact. A sparse gradient that DDP does not know about."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight, sparse=True)


def test_a_sparse_gradient_of_what_is_no_table_is_refused() -> None:
    with fake_world.fake_world(2, 0), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_Called())
        words = "weight of DDP .* has a gradient of layout torch.sparse_coo"
        with pytest.raises(RuntimeError, match=words):
            ddp(torch.arange(3)).sum().backward()


@pytest.mark.usefixtures("one_rank")
def test_a_table_that_a_dense_layer_uses_too_keeps_its_dense_gradient() -> None:
    """Eager DDP refuses it."""
    alone, ids = _Tied(), torch.arange(3)
    alone(ids).sum().backward()
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(copy.deepcopy(alone))
        for _ in range(2):
            ddp.zero_grad()
            ddp(ids).sum().backward()
    gradient, wanted = ddp.module.table.weight.grad, alone.table.weight.grad
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank")
def test_a_communication_hook_is_given_sparse_gradients_by_ddps_own_reducer() -> None:
    seen = list[torch.layout]()

    def mine(state, bucket):  # DDP compares annotations, which must not be strings.
        seen.append(bucket.buffer().layout)
        return noop_hook(state, bucket)

    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(_Towers())
        words = "it has sparse gradients and communication hook .*mine, which is to be given them"
        with pytest.warns(FusionWarning, match=words):
            ddp.register_comm_hook(None, mine)
        ddp(torch.arange(3)).sum().backward()
    assert seen.count(torch.sparse_coo) == 2
    assert torch.strided in seen


@pytest.mark.usefixtures("one_rank")
def test_each_table_is_a_bucket_of_its_own_and_counts_in_no_other() -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(Tables(), bucket_cap_mb=144 / 2**20)  # The last layer's size.
        for _ in range(2):
            ddp(torch.arange(ROWS).view(-1, 2), "b").sum().backward()
    buckets = reducer_of(ddp).assignment.layout.buckets
    assert [bucket.numbers for bucket in buckets if bucket.is_sparse] == [(1,), (0,)]
    assert [len(bucket.numbers) for bucket in buckets if not bucket.is_sparse] == [2, 2]
    logged = ddp._get_ddp_logging_data()
    assert logged["num_buckets_reduced"] == 2
    order = logged["prev_iteration_grad_ready_order_indices"]
    assert set(map(int, order.split(", "))) == {2, 3, 4, 5}


class _Towers(nn.Module):
    """Two tables with a layer above each, in such an order that Inductor, unless it is prevented,
    overwrites the gradient of the second table with values for the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Embedding(10, WIDTH, sparse=True) for _ in range(2))
        self.first_layer, self.next_layer, self.second_layer = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )
        self.wide, self.last = nn.Linear(WIDTH, 400), nn.Linear(400, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.next_layer(self.first_layer(self.first(ids)).sin())
        both = self.second_layer(self.second(ids)) + first
        out: Tensor = self.last(self.wide(both).sin().exp())
        return out


@pytest.mark.newest_torch
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["concat", pytest.param("coalesced", marks=pytest.mark.nightly)])
def test_nothing_is_computed_where_a_gradient_lies(mode: FusionMode) -> None:
    torch.manual_seed(0)
    model, ids = _Towers(), torch.randint(0, 10, (5, 3))
    alone = copy.deepcopy(model)
    alone(ids).square().sum().backward()
    with inductor_config.patch(ddp_fusion=mode):
        ddp = DistributedDataParallel(model)
        torch.compile(ddp)(ids).square().sum().backward()
    assert fusion_passes.report().backwards[-1].reduced_in == "reducer"
    for name, parameter in alone.named_parameters():
        gradient, wanted = model.get_parameter(name).grad, parameter.grad
        torch.testing.assert_close(gradient.to_dense(), wanted.to_dense(), msg=name)
