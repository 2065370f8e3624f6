"""Where the autograd graph of a backward ends, and what is remembered of that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusion_passes.ddp.autograd_graph import ends_of


class _Keeping(torch.autograd.Function):
    """Keeps a tensor under the name under which a node that accumulates has its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = torch.ones(())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.variable * gradient


def test_a_functions_own_variable_is_no_leaf() -> None:
    weight = nn.Parameter(torch.ones(2))
    loss = _Keeping.apply(weight).sum()
    assert [id(leaf) for leaf in ends_of([loss]).leaves] == [id(weight)]


def test_each_leaf_is_found_as_often_as_it_is_read() -> None:
    shared, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    loss = (shared * other + shared).sum()
    leaves = [id(leaf) for leaf in ends_of([loss]).leaves]
    assert sorted(leaves) == sorted([id(shared), id(shared), id(other)])
    edge = torch.autograd.graph.get_gradient_edge(shared)
    assert [id(leaf) for leaf in ends_of([edge]).leaves] == [id(shared)]
    assert ends_of([torch.ones(())]).leaves == []
