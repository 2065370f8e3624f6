"""Hooks on the nodes that accumulate gradients: when nodes are asked for them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.node_hooks import node_hooks
from fusion_passes.torch_private.autograd import have_hooks_on_nodes
from testing.fake_world import one_rank


def test_nodes_are_asked_once_and_again_after_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(parameters: Iterable[Tensor]) -> bool:
        asked.append(1)
        return have_hooks_on_nodes(parameters)

    monkeypatch.setattr("fusion_passes.ddp.node_hooks.have_hooks_on_nodes", counted)
    with one_rank(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        assert node_hooks.modules() == frozenset()
        asked.clear()
        assert node_hooks.modules() == frozenset()
        assert not asked, "to be asked is no hook: it would be asked in each backward"
        node = torch.autograd.graph.get_gradient_edge(ddp.module.bias).node
        node.register_prehook(lambda gradients: None)
        assert node_hooks.modules() == {registry.module_of(ddp).group_name}
