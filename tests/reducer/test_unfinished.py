"""Gradients, and other modules, after a backward that did not finish its iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.launch_queue import LaunchQueue
from fusion_passes.reducer.memory import BucketMemory
from fusion_passes.reducer.reducer import reducer_of
from testing.models import fill_whole
from testing.processes import RUN

X = torch.ones(1, 2)


class Heads(nn.Module):
    """Exact. Two layers with a backward each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        fill_whole(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("a user's error")


def _average(value: Tensor) -> Tensor:
    summed = value.clone()
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def left_between_two_backwards() -> None:
    """Rank 1 launches its first bucket after rank 0 has ended its first backward."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(Heads(), bucket_cap_mb=1e-6)
        x = X * (1 + dist.get_rank())
        local = x.expand(2, 2)
        average = _average(local)
        sum(output.sum() for output in ddp(x)).backward()
        order = [b.numbers[0] for b in reducer_of(ddp).assignment.layout.buckets]
        first, second = (ddp.module.heads[number].weight for number in order)
        ddp.zero_grad()
        outputs = ddp(x)
        outputs[order[0]].sum().backward()
        assert torch.equal(first.grad, average)
        assert first.grad.untyped_storage().nbytes() == first.nbytes, "memory of its own"
        first.grad.zero_()  # The edit is not averaged, as with eager DDP.
        outputs[order[1]].sum().backward()
        assert torch.equal(first.grad, average)
        assert torch.equal(second.grad, average)
        ddp.zero_grad()
        outputs = ddp(x)
        outputs[order[1]].sum().backward()  # Its bucket is the second one: nothing is launched.
        assert torch.equal(second.grad, local)
        second.grad.zero_()
        outputs[order[0]].sum().backward()
        assert torch.equal(first.grad, average)
        assert torch.equal(second.grad, average)


def test_gradients_between_two_backwards_of_an_iteration(run_on_ranks: RUN) -> None:
    """Averages if the bucket was launched, local gradients otherwise; never a value that is being
    written."""
    run_on_ranks(2, left_between_two_backwards)


def _two_steps(ddp: Any) -> None:
    for _ in range(2):
        ddp.zero_grad()
        ddp(X).sum().backward()


def _layers() -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(2, 2, bias=False) for _ in range(3))
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-6)


@pytest.mark.usefixtures("fused_rank")
def test_after_an_error_gradients_are_local_or_none() -> None:
    """``None`` if the bucket is being all-reduced: this rank does not know its final value."""
    ddp = _layers()
    _two_steps(ddp)
    reducer = reducer_of(ddp)
    caps = [bucket.numbers for bucket in reducer.assignment.layout.buckets]
    assert caps == [(2,), (1,), (0,)]
    expected = torch.autograd.grad(ddp.module(X).sum(), list(ddp.parameters()))
    ddp.zero_grad()
    middle = ddp.module[0](X).requires_grad_()
    middle.register_hook(_fail)
    ddp(X)
    launches = iter([True, False, False])
    launch = LaunchQueue.launch_ready

    def launch_one(self: LaunchQueue) -> None:
        if next(launches, False):
            launch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchQueue, "launch_ready", launch_one)
        with pytest.raises(ZeroDivisionError):
            ddp.module[1:](middle).sum().backward()
    assert [p.grad is None for p in ddp.parameters()] == [True, False, True]
    assert torch.equal(ddp.module[1].weight.grad, expected[1])
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(X)


@pytest.mark.usefixtures("fused_rank")
def test_an_error_is_raised_where_memory_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other modules continue."""
    failing, other = _layers(), _layers()
    for ddp in (failing, other):
        _two_steps(ddp)
        ddp.zero_grad()

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for a clone")

    hidden = failing.module[0](X)
    hidden.register_hook(_fail)
    failing(X)
    loss = failing.module[1:](hidden).sum() + other(X).sum()
    monkeypatch.setattr(BucketMemory, "un_alias", run_out)
    monkeypatch.setattr(LaunchQueue, "launch_ready", lambda _: None)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        failing(X)
    assert all(parameter.grad is None for parameter in failing.parameters())
    assert reducer_of(other).backward is None
    del failing
    other = _layers()
    _two_steps(other)
    assert all(parameter.grad is not None for parameter in other.parameters())
