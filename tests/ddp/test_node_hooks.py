"""Hooks on the nodes that accumulate gradients: when nodes are asked for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.torch_private.autograd import hooks_on_node
from testing.fake_world import one_rank


def test_nodes_are_asked_once_and_again_after_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counted(node: Any) -> tuple[int, int]:
        asked.append(node)
        return hooks_on_node(node)

    monkeypatch.setattr("fusion_passes.reducer.backward.hooks_on_node", counted)
    with one_rank(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        ddp(torch.ones(2, 2)).sum().backward()
        assert len(asked) == 2
        asked.clear()
        ddp(torch.ones(2, 2)).sum().backward()
        assert not asked, "to be asked is no hook: it would be asked in each backward"
        seen: list[torch.Tensor] = []
        node = torch.autograd.graph.get_gradient_edge(ddp.module.bias).node
        node.register_prehook(lambda gradients: seen.append(gradients[0]))
        ddp(torch.ones(2, 2)).sum().backward()
    assert len(asked) == 2
    assert len(seen) == 1
