"""Fused backwards under Inductor's C++ wrapper, which calls the package's operators from C++."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from testing.fake_world import fake_world

WORLD_SIZE = 2


class Convolution(nn.Module):
    """Gradients that are stored in the bucket by their kernels, and such that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.convolution(x).flatten(1))


@pytest.mark.slow
@pytest.mark.nightly  # Of the wrapper's code, test_generated_triton.py has what each check reads.
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_gradients_are_those_of_the_module(mode: str) -> None:
    if mode == "coalesced" and torch.__version__ < "2.14":
        pytest.skip("this torch cannot call all_reduce_coalesced from C++, fused or not")
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = Convolution(), torch.randn(4, 3, 8, 8)
    plain = copy.deepcopy(module)
    settings = {"ddp_fusion": mode, "cpp_wrapper": True, "fx_graph_cache": False}
    with fake_world(WORLD_SIZE), inductor_config.patch(settings):
        ddp = DistributedDataParallel(module)

        @torch.compile
        def step() -> None:
            ddp(x).square().mean().backward()

        _, code = run_and_get_code(step)
        (report,) = fusion_passes.reports()[-1:]
    torch._dynamo.reset()
    assert report.collectives_after == 1
    assert "inductor_entry_impl" in code[-1]
    assert "all_reduce_" in code[-1]
    # Torch 2.11 calls it through Python.
    stores = re.search(r"fusion_passes(::|\.)store_", code[-1])
    assert (stores is not None) == (mode == "concat")
    # What the fake process group sums is this rank's share alone.
    plain(x).square().mean().backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad / WORLD_SIZE)
