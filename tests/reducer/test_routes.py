"""The route that is kept of one backward for the next ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.backward import Reducers, reducers
from fusion_passes.reducer.reducer import reducer_of

pytestmark = pytest.mark.usefixtures("fused_rank")

X = torch.ones(2, 4)


def _ddp() -> Any:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def _step(ddp: Any, forward: Any) -> int:
    ddp.zero_grad()
    forward(X).sum().backward()
    expected = torch.autograd.grad(
        ddp.module(X).sum(), [p for p in ddp.parameters() if p.requires_grad]
    )
    found = tuple(p.grad for p in ddp.parameters() if p.requires_grad)
    torch.testing.assert_close(found, expected)
    return reducer_of(ddp).record.num_stored


def test_a_route_is_found_once() -> None:
    ddp = _ddp()
    compiled = torch.compile(ddp)
    layers: list[Any] = [torch.compile(layer) for layer in ddp.module]

    def by_layers(x: Any) -> Any:
        with mock.patch.object(ddp, "module", nn.Sequential(*layers)):
            return ddp(x)

    find = Reducers._find_route
    with mock.patch.object(Reducers, "_find_route", autospec=True, side_effect=find) as finding:
        counts = [_step(ddp, f) for f in (compiled, compiled, by_layers, compiled, by_layers)]
    assert counts == [0, 4, 4, 4, 4]
    assert finding.call_count == 2, "one for each of the two ways to compile the module"


def test_a_parameter_that_is_frozen_meanwhile_and_thawed() -> None:
    ddp = DistributedDataParallel(_ddp().module, find_unused_parameters=True)
    compiled = torch.compile(ddp)
    counts = []
    for is_trained in (True, True, False, True):
        ddp.module[0].weight.requires_grad_(is_trained)
        counts.append(_step(ddp, compiled))
    assert counts == [0, 4, 3, 4]


def test_a_gradient_that_is_there_before_a_step() -> None:
    """The graph that stores a gradient looks for it, or a hook does."""
    ddp = _ddp()
    compiled = torch.compile(ddp)
    for forward in (compiled, compiled, compiled, ddp, compiled):
        _step(ddp, forward)
        doubled = [2 * parameter.grad for parameter in ddp.parameters()]
        forward(X).sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in ddp.parameters()], doubled)


def test_an_unfinished_iteration_before_a_forward_that_dynamo_traces() -> None:
    """The forward has no guard on the module's state: the backward raises its error."""
    ddp = _ddp()

    @torch.compile(fullgraph=True)
    def forward(x: Any) -> Any:
        return ddp(x)

    for _ in range(2):
        _step(ddp, forward)
    forward(X)
    ddp.module[1](X).sum().backward()
    loss = forward(X).sum()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        loss.backward()
    assert not reducers.compiled
