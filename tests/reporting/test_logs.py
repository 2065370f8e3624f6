"""The package's output in torch's own tools: TORCH_LOGS and tlparse."""

from __future__ import annotations

import logging

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch._logging._internal as torch_logging
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.artifacts import traced_artifacts
from tests.support.fake_world import fake_world


def test_torch_logs_takes_the_packages_name() -> None:
    state = torch_logging._parse_log_settings("+fusion_passes")
    assert state.log_qname_to_level["fusion_passes"] == logging.DEBUG


def test_tlparse_gets_the_backward_that_stores_gradients() -> None:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"), traced_artifacts() as texts:
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
        ddp = DistributedDataParallel(model)
        torch.compile(ddp)(torch.ones(2, 4)).sum().backward()
    assert "store_gradients_(" in texts["ddp_fusion_stored"]
    assert "all_reduce" not in texts["ddp_fusion_stored"]
