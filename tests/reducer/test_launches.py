"""A backward goes on beside its launches: no graph, and nothing between graphs, waits for a bucket
before all are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from testing.scenarios.features.models import MODELS
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run

RUN = Callable[..., list[Any]]


def goes_on_beside_its_launches(mode: str, is_disabled: bool) -> None:
    """Rank 1 launches nothing before rank 0 has run all graphs, which launch the same."""
    others, word = dist.new_group(), torch.zeros(1)

    def hear(_: Tensor) -> None:
        dist.recv(word, 0, others)

    def tell(_: Tensor) -> None:
        dist.send(word, 1, others)

    run = Run(is_fused=True, dtype=torch.float32, device=torch.device("cpu"))
    make = MODELS["disabled" if is_disabled else "in parts"]
    x = run.rows(2)[0]
    want = DistributedDataParallel(make(run))
    want(x).square().sum().backward()
    with inductor_config.patch(ddp_fusion=mode):
        ddp = run.ddp(make(run), bucket_cap_mb=1e-6)
        call = run.compile(ddp)
        backwards(run, ddp, call, 2)  # Buckets are rebuilt in the first one.
        ddp.zero_grad()
        x.requires_grad_()
        y = call(x)
        if dist.get_rank():
            y.register_hook(hear)
        else:
            x.register_hook(tell)
        y.square().sum().backward()
    for mine, its in zip(ddp.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    dist.destroy_process_group(others)


@pytest.mark.parametrize(
    ("mode", "is_disabled"),
    [
        ("concat", False),
        ("coalesced", True),
        pytest.param("coalesced", False, marks=pytest.mark.nightly),
    ],
)
def test_a_backward_does_not_wait_for_what_was_launched_before(
    run_on_ranks: RUN, mode: str, is_disabled: bool
) -> None:
    run_on_ranks(2, goes_on_beside_its_launches, mode=mode, is_disabled=is_disabled)
