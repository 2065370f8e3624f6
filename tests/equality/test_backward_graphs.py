"""Graphs that reduce go on beside their launches, and what AOTAutograd's backward must not reduce
is traced.

Which graph reduces what, and that both give the gradients of eager DDP, is said and tested for each
entry of the catalogue (``test_scenarios.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from testing.models import linear_loss
from testing.scenarios.features.parts import InParts, Outside
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run

RUN = Callable[..., list[Any]]


def _run() -> Run:
    return Run("fused", torch.float32, torch.device("cpu"))


def goes_on_beside_its_launches(mode: str, has_outside: bool) -> None:
    """Rank 1 launches nothing before rank 0 has run all graphs, which launch the same."""
    others, word = dist.new_group(), torch.zeros(1)

    def hear(_: Tensor) -> None:
        dist.recv(word, 0, others)

    def tell(_: Tensor) -> None:
        dist.send(word, 1, others)

    run, make = _run(), Outside if has_outside else InParts
    x = run.rows(2)[0]
    want = DistributedDataParallel(make())
    want(x).square().sum().backward()
    with inductor_config.patch(ddp_fusion=mode):
        ddp = run.ddp(make())
        call = run.compile(ddp)
        backwards(run, ddp, call, 2)  # The ranks meet in the first one.
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
    ("mode", "has_outside"),
    [
        ("concat", False),
        ("coalesced", True),
        pytest.param("coalesced", False, marks=pytest.mark.nightly),
    ],
)
def test_a_graph_does_not_wait_for_what_was_launched_before(
    run_on_ranks: RUN, mode: str, has_outside: bool
) -> None:
    run_on_ranks(2, goes_on_beside_its_launches, mode=mode, has_outside=has_outside)


def no_trace(**settings: Any) -> int:
    """How many backwards are traced of a plain training with these options."""
    run = _run()
    with inductor_config.patch(ddp_fusion=FusionConfig(**settings)):
        ddp = run.ddp(run.mlp(2))
        counters.clear()
        linear_loss(run.compile(ddp), run.rows(0)).backward()
    return int(counters["compiled_autograd"]["captures"])


@pytest.mark.parametrize("settings", [{"scaling": "store"}, {"reduce_dtype": "bf16"}], ids=str)
def test_what_aot_autograd_must_not_reduce_is_traced(
    run_on_ranks: RUN, settings: dict[str, Any]
) -> None:
    assert all(run_on_ranks(2, no_trace, **settings))
