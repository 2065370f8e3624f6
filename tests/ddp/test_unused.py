"""With ``find_unused_parameters=True``, a step launches its buckets and one small collective, by
which the ranks learn what each has used, whatever branches they take. The catalogue of scenarios
has trainings beside eager DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from testing import models
from tests.reducer.test_reducer import sequence_number

RUN = Callable[..., list[Any]]


def train(steps: Sequence[Sequence[str]]) -> list[int]:
    """How many collectives each step has that takes these branches, one for each rank; a job for
    every rank."""
    import fusion_passes  # noqa: F401 - the ranks have not

    torch._dynamo.reset()
    collectives = []
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(models.Branching(), find_unused_parameters=True)
        compiled = torch.compile(ddp)
        for takes in steps:
            before = sequence_number()
            taken = takes[dist.get_rank() % len(takes)]
            compiled(torch.ones(4, models.WIDTH), taken).sum().backward()
            collectives.append(sequence_number() - before)
            ddp.zero_grad()
    return collectives


def test_branches_cost_nothing_but_what_says_which(run_on_ranks: RUN) -> None:
    """Whatever a rank takes, now or for the first time: a bucket, and what was used. In the first
    step buckets are rebuilt too."""
    for collectives in run_on_ranks(2, train, steps=[["a", "b"], ["b", "a"], ["ab"]]):
        assert collectives == [3, 2, 2]


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


class Checkpointed(nn.Module):
    """The backward of its last layer runs inside of a node, where nobody sees it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + checkpoint(self.last, y, use_reentrant=True)


def a_backward_inside(flag: str | None) -> str:
    """The error; a job for every rank."""
    import fusion_passes  # noqa: F401 - the ranks have not

    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(Checkpointed(), find_unused_parameters=True)
        try:
            ddp(torch.ones(4, 8)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_parameter_that_passed_for_unused_is_refused_as_by_eager_ddp(run_on_ranks: RUN) -> None:
    for flag in (None, "concat"):
        for said in run_on_ranks(2, a_backward_inside, flag=flag):
            assert "Expected to mark a variable ready only once" in said


def _other_options(rank_with: int) -> str:
    from fusion_passes.state import process_state

    process_state.reset()
    with inductor_config.patch(ddp_fusion="concat"):
        try:
            DistributedDataParallel(
                models.mlp(), find_unused_parameters=dist.get_rank() == rank_with
            )
        except RuntimeError as error:
            return str(error)
    return ""


def test_the_option_on_one_rank_alone_is_an_error(run_on_ranks: RUN) -> None:
    for text in run_on_ranks(2, _other_options, rank_with=1):
        assert "find_unused_parameters of DistributedDataParallel must be the same on all" in text
        assert "false on rank 0" in text
        assert "true on rank 1" in text
