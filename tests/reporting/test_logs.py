"""What torch's own tools show of the package: TORCH_LOGS and tlparse."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch._logging._internal as torch_logging
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from testing.fake_world import fake_world


def test_torch_logs_takes_the_packages_name() -> None:
    state = torch_logging._parse_log_settings("+fusion_passes")
    assert state.log_qname_to_level["fusion_passes"] == logging.DEBUG


def test_tlparse_gets_the_backward_that_stores_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    log = logging.getLogger("torch.__trace")
    log.addHandler(handler)
    try:
        with fake_world(), inductor_config.patch(ddp_fusion="concat"):
            torch._dynamo.reset()
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
            ddp = DistributedDataParallel(model)
            torch.compile(ddp)(torch.ones(2, 4)).sum().backward()
    finally:
        log.removeHandler(handler)
    texts = {
        record.metadata["artifact"]["name"]: record.payload  # type: ignore[attr-defined]
        for record in records
        if "artifact" in record.metadata  # type: ignore[attr-defined]
    }
    assert "store_gradients_(" in texts["ddp_fusion_stored"]
    assert "all_reduce" not in texts["ddp_fusion_stored"]
