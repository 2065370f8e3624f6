"""With ``find_unused_parameters=True``, what no rank uses costs nothing, and nothing is compiled or
agreed on anew once all branches have been seen. The catalogue of scenarios has trainings beside
eager DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionWarning
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.modules import registry
from testing import models

RUN = Callable[..., list[Any]]


@dataclass
class Training:
    """What came of a training on a rank: how many collectives each step had, how many graphs have
    been compiled after it, how many backwards compiled autograd has traced, and the report's names
    for the buckets."""

    collectives: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    traced: int = 0
    names: list[str] = field(default_factory=list)


def train(steps: Sequence[Sequence[str]]) -> Training:
    """Train with the branches that each rank takes, step by step; a job for every rank."""
    import fusion_passes
    from fusion_passes.state import process_state

    torch._dynamo.reset()
    process_state.reset()
    counters.clear()
    training = Training()
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(models.Branching(), find_unused_parameters=True)
        compiled = torch.compile(ddp)
        known = len(fusion_passes.reports())
        for takes in steps:
            before = _collectives()
            compiled(
                torch.ones(4, models.WIDTH), takes[dist.get_rank() % len(takes)]
            ).sum().backward()
            training.collectives.append(_collectives() - before)
            training.graphs.append(len(fusion_passes.reports()) - known)
            ddp.zero_grad()
        buckets = [bucket for graph in fusion_passes.report().graphs for bucket in graph.buckets]
        training.names = [bucket.name for bucket in buckets]
    training.traced = counters["compiled_autograd"]["captures"]
    return training


def _collectives() -> int:
    group: Any = dist.group.WORLD
    number: int = group._get_sequence_number_for_group()
    return number


@pytest.mark.parametrize("used", [pytest.param("abc", marks=pytest.mark.newest_torch), "ab"])
def test_what_is_never_used_costs_nothing(run_on_ranks: RUN, used: str) -> None:
    """One graph, and one collective a step, as without the option."""
    for ours in run_on_ranks(2, train, steps=[[used]] * 3):
        assert ours.graphs == [1, 1, 1]
        assert ours.collectives == [1, 1, 1]
        assert ours.traced == 0
        assert [text.split(") ")[1] for text in ours.names] == ["bucket 0"]


def test_branches_are_compiled_once_and_reduced_at_once(run_on_ranks: RUN) -> None:
    """When each rank has seen all branches, each step is one collective, and none compiles."""
    takes = [["a", "b"], ["b", "a"], ["a"], ["b"]]
    for ours in run_on_ranks(2, train, steps=[*takes, *takes, *takes]):
        settled = 2 * len(takes)
        assert ours.collectives[settled:] == [1] * len(takes)
        assert len(set(ours.graphs[settled:])) == 1


class Blocks(nn.Module):
    """Blocks that are compiled one by one, in the order of their registration or the opposite one,
    some of which a step leaves out."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        # Block.compile() would compile nothing: torch leaves its own forwards as they are.
        compiled: Callable[[nn.Module], Any] = torch.compile
        self.blocks = nn.ModuleDict({name: compiled(nn.Linear(8, 8)) for name in "abcd"})

    def forward(self, x: Tensor, takes: str) -> Tensor:
        for name in self.order:
            if name in takes:
                x = self.blocks[name](x).tanh()
        return x


def when_in_parts(order: str) -> list[int]:
    """The steps whose backward was not reduced by its graphs, of some after one in which no rank
    has had all of them; a job for every rank."""
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(Blocks(order), find_unused_parameters=True)
        usage = participants[registry.module_of(ddp).group_name].usage
        assert usage is not None
        found = []
        for step, takes in enumerate([("bd", "ac")[dist.get_rank()], *["abcd"] * 8]):
            ddp(torch.ones(4, 8, requires_grad=True), takes).sum().backward()
            ddp.zero_grad()
            found += [step] if usage.is_in_parts else []
    return found


@pytest.mark.parametrize(("order", "in_parts"), [("abcd", []), ("dcba", [1, 3, 4])])
def test_blocks_come_to_one_order(run_on_ranks: RUN, order: str, in_parts: list[int]) -> None:
    """At once, if they are used in the order of their registration; else as they come, once all
    ranks have learnt that what they have agreed on first was chance."""
    assert run_on_ranks(2, when_in_parts, order=order) == [in_parts] * 2


class Heads(nn.Module):
    """Two outputs that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).sum(), self.b(x).sum()


def a_backward_each(flag: str | None) -> list[str]:
    """What is said of a backward of each output; a job for every rank."""
    with inductor_config.patch(ddp_fusion=flag), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusionWarning)
        ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
        first, second = ddp(torch.ones(4, 8))
        first.backward()
        try:
            second.backward()
        except RuntimeError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]


def test_what_eager_ddp_refuses_is_told(run_on_ranks: RUN) -> None:
    for said in run_on_ranks(2, a_backward_each, flag=None):
        assert "backward through the graph a second time" in said[0]
    for said in run_on_ranks(2, a_backward_each, flag="concat"):
        assert [text for text in said if "eager DDP raises" in text], said


def _other_options(rank_with: int) -> str:
    from fusion_passes.state import process_state

    process_state.reset()
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(
            models.mlp(), find_unused_parameters=dist.get_rank() == rank_with
        )
        try:
            torch.compile(ddp)(torch.ones(2, models.WIDTH)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_the_option_on_one_rank_alone_is_an_error(run_on_ranks: RUN) -> None:
    for text in run_on_ranks(2, _other_options, rank_with=1):
        assert "find_unused_parameters of DistributedDataParallel must be the same on all" in text
        assert "false on rank 0" in text
        assert "true on rank 1" in text
