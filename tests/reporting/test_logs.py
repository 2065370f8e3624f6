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


def test_tlparse_gets_the_graph_before_and_after_the_plan_and_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert texts["ddp_fusion_0_traced"].count("all_reduce(") == 4
    last = max(
        (name for name in texts if name.startswith("ddp_fusion_") and name[11].isdigit()),
        key=lambda name: int(name.split("_")[2]),
    )
    assert last.endswith("PinOrder")
    assert texts[last].count("all_reduce(") == 1
    assert "bucket 0: 4 gradients" in texts["ddp_fusion_plan"]
    assert "1 launched a step" in texts["ddp_fusion_report"]
