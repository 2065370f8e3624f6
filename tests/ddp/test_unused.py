"""``find_unused_parameters=True`` where eager DDP raises an error. The catalogue of scenarios has
trainings beside eager DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

RUN = Callable[..., list[Any]]


class Heads(nn.Module):
    """Two outputs that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).sum(), self.b(x).sum()


def a_backward_each(flag: str | None) -> list[Any]:
    """The gradients, or the error, of a backward of each output, and what is warned of; a job for
    every rank."""
    import fusion_passes

    torch.manual_seed(0)
    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
        first, second = ddp(torch.full((4, 8), 1.0 + dist.get_rank()))
        first.backward()
        try:
            second.backward()
        except RuntimeError as error:
            return [str(error)]
    means = [float(parameter.grad.mean()) for parameter in ddp.parameters()]
    return [*means, *fusion_passes.report().warnings]


def test_after_the_backward_of_an_output_that_of_another_is_not_averaged(run_on_ranks: RUN) -> None:
    """Eager DDP refuses it: its sink has marked the other's parameters ready in the first one."""
    for (said,) in run_on_ranks(2, a_backward_each, flag=None):
        assert "backward through the graph a second time" in said
    for rank, (*means, said) in enumerate(run_on_ranks(2, a_backward_each, flag="concat")):
        assert means == [6.0, 4.0, 4.0 * (1 + rank), 4.0]
        assert "stay on their rank, as with eager DDP: its forward has had its backward" in said
