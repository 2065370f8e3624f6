"""Trainings that random ones have led to: each was an error, or wrong, where eager DDP is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning
from fusion_passes.config import FusionMode


def _gradients(*modules: nn.Module) -> list[Tensor]:
    """Copies of all that there are."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [p.grad.clone() for p in parameters if p.grad is not None]


class Recurrent(nn.Module):
    """A weight that is read in each of two time steps has a gradient from both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(4, 4, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.inner(x.view(x.shape[0], 2, 4))
        result: Tensor = self.head(output.reshape(x.shape[0], 8))
        return result


def one_of_two_modules_may_lack_gradients(compiles: bool) -> list[Tensor]:
    """They are in one backward, whose graphs launch before others are done."""
    first = DistributedDataParallel(nn.Linear(8, 8))
    second = DistributedDataParallel(Recurrent(), find_unused_parameters=True)
    calls = [torch.compile(ddp) if compiles else ddp for ddp in (first, second)]
    found = []
    for _ in range(2):
        for ddp in (first, second):
            ddp.zero_grad()
        calls[1](calls[0](torch.randn(3, 8))).square().sum().backward()
        found += _gradients(first, second)
    return found


def a_graph_is_kept_under_no_sync(compiles: bool) -> list[Tensor]:
    """What the forward has saved is needed a second time."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    call = torch.compile(ddp) if compiles else ddp
    with ddp.no_sync():
        loss = call(torch.randn(3, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    call(torch.randn(3, 8)).square().sum().backward()
    return _gradients(ddp)


def forwards_that_change_buffers_share_a_backward(compiles: bool) -> list[Tensor]:
    """The first forward has saved the buffers that the second one gets from another rank."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)))

    def backward(x: Tensor) -> None:
        (ddp(x) * ddp(x.square())).exp().sum().backward()

    step = torch.compile(backward) if compiles else backward
    for _ in range(2):
        step(torch.randn(3, 8))
    return [*_gradients(ddp), *[buffer.clone() for buffer in ddp.buffers()]]


class Heads(nn.Module):
    """Two outputs, whose layers are compiled one by one: a backward from one reaches no other."""

    def __init__(self, compiles: bool) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))
        if compiles:
            for layer in self.children():
                layer.compile()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def a_backward_repeats_one_that_was_incomplete(compiles: bool) -> list[Tensor]:
    """Of the same output or of another: DDP refuses it at once, and not only in the next forward.
    What it leaves in gradients before that is not looked at."""
    for second in (0, 1):
        ddp = DistributedDataParallel(Heads(compiles))
        outputs = ddp(torch.randn(3, 8))
        outputs[0].square().sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
            outputs[second].square().sum().backward()
        with pytest.raises(RuntimeError):
            ddp(torch.randn(3, 8))
    return [torch.zeros(())]


Case = Callable[[bool], list[Tensor]]


def train_both_ways(flag: FusionMode, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """A job for every rank: what eager DDP gives, and what comes under the flag."""

    def seeded(compiles: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(dist.get_rank())  # DDP gives all ranks the parameters of the first.
        return case(compiles)

    eager = seeded(compiles=False)
    with inductor_config.patch(ddp_fusion=flag), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        return eager, seeded(compiles=True)


@pytest.mark.parametrize("flag", ["concat", pytest.param("coalesced", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "case",
    [
        one_of_two_modules_may_lack_gradients,
        a_graph_is_kept_under_no_sync,
        forwards_that_change_buffers_share_a_backward,
        a_backward_repeats_one_that_was_incomplete,
    ],
)
def test_gradients_are_those_of_eager_ddp(
    run_on_ranks: Callable[..., Any], case: Case, flag: FusionMode
) -> None:
    results = run_on_ranks(2, train_both_ways, flag=flag, case=case)
    for rank, (eager, fused) in enumerate(results):
        assert len(eager) == len(fused) > 0
        for one, other in zip(eager, fused, strict=True):
            torch.testing.assert_close(one, other, msg=f"on rank {rank}")
