"""A step launches what its report says, and nothing else: what was reduced twice would be the same
average, and take twice as long."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.config import BackwardGraph, ReduceMode
from fusion_passes.torch_private.groups import collectives_issued
from testing.fake_world import one_rank, two_layers, without_kernels


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("graph", ["aot_autograd", "compiled_autograd"])
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_a_step_launches_what_its_report_says(
    mode: ReduceMode, graph: BackwardGraph, keeps_gradients: bool
) -> None:
    torch._dynamo.reset()
    flag = FusionConfig(mode=mode, backward_graph=graph, bucket_cap_mb=32 / 2**20)
    with inductor_config.patch(ddp_fusion=flag), one_rank(), without_kernels():
        ddp = DistributedDataParallel(two_layers())
        model, issued = torch.compile(ddp), list[int | None]()
        for _ in range(4):
            ddp.zero_grad(set_to_none=not keeps_gradients)
            model(torch.ones(2, 4)).sum().backward()
            issued.append(collectives_issued(ddp.process_group.group_name))
    (launched,) = {report.collectives_after for report in fusion_passes.reports()}
    assert launched > 1
    first = issued[0]
    assert first is not None
    assert issued == [first + step * launched for step in range(4)]
