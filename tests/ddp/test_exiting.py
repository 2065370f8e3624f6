"""A module over Gloo that is freed after its group gives Gloo's threads a moment."""

from __future__ import annotations

import time

import pytest
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.parametrize("is_destroyed", [True, False])
def test_a_module_pauses_only_where_its_group_may_go_with_it(
    monkeypatch: pytest.MonkeyPatch, is_destroyed: bool
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with inductor_config.patch(ddp_fusion="concat"):
            ddp = DistributedDataParallel(nn.Linear(2, 2))
        if is_destroyed:
            dist.destroy_process_group()
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        del ddp
        assert pauses == ([0.05] if is_destroyed else [])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
