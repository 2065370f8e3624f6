"""``find_unused_parameters=True`` is fused: gradients are those of eager DDP whatever a rank uses,
ranks that use other parameters run the same collectives, and nothing is compiled or agreed on anew
once all branches have been seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from testing import models
from testing.equality import tensor_difference

RUN = Callable[..., list[Any]]

CHANGING = [
    ["a", "b"],
    ["b", "a"],
    ["a", "a"],
    ["b", "b"],
    ["abc", "a"],
    ["a", "c"],
    ["c", "a"],
    ["b", "b"],
    ["a", "b"],
    ["", "c"],
]
"""The branches that each rank takes, step by step."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        takes: the branches that each rank takes, step by step.
        style: what is compiled under the flag: the module, the step, or its backward alone.
        zero: what becomes of gradients between steps.
        local: the steps that run under ``no_sync``, after which gradients are kept.
        options: of DDP.
        hook: a communication hook.
        dtypes: of branches that have another dtype.
    """

    takes: Sequence[Sequence[str]]
    style: Literal["forward", "step", "backward"] = "forward"
    zero: Literal["none", "zero", "kept"] = "none"
    local: Sequence[int] = ()
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


CASES = {
    "all are used": Case([["abc"]] * 3),
    "one is never used": Case([["ab"]] * 3),
    "other ranks in each step": Case(CHANGING[:5]),
    "other ranks in many steps": Case(CHANGING),
    "in turn": Case(CHANGING[:4]),
    "a new branch on all ranks, and back": Case([["a"], ["a"], ["c"], ["c"], ["c"], ["a"], ["a"]]),
    "step": Case(CHANGING[:6], style="step"),
    "backward": Case(CHANGING[:6], style="backward"),
    "gradients kept": Case([["a", "b"], ["b", "a"], ["a"], ["b"], ["a", "b"]], zero="kept"),
    "more gradients kept": Case([["a"], ["c", "b"], ["a", "b"], ["", "c"]], zero="kept"),
    "gradients zeroed": Case([["a", "b"], ["b", "a"], ["a"], ["c", "b"], ["a"]], zero="zero"),
    "no_sync": Case([["a", "b"], ["b"], ["a"], ["b"], ["a"], ["a"]], local=(0, 1, 3)),
    "fp16_compress_hook": Case(CHANGING[:6], hook=default_hooks.fp16_compress_hook),
    "several dtypes": Case(CHANGING[:6], dtypes={"b": torch.bfloat16, "c": torch.float64}),
    "skipped": Case([["a"]] * 3, options={"skip_all_reduce_unused_params": True}),
    "a static graph": Case([["a", "b"]] * 4, options={"static_graph": True}),
}


@dataclass
class Training:
    """What came of a case on a rank: gradients after each step, the warnings, how many
    collectives each step had, how many graphs have been compiled after it, how many backwards
    compiled autograd has traced, and the report's names for the buckets."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    traced: int = 0
    names: list[str] = field(default_factory=list)


def train(case: Case, flag: str | None) -> Training:
    """Train one case; a job for every rank."""
    import fusion_passes
    from fusion_passes.state import process_state

    torch._dynamo.reset()
    process_state.reset()
    counters.clear()
    training = Training()
    with inductor_config.patch(ddp_fusion=flag), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(
            models.Branching(case.dtypes), find_unused_parameters=True, **case.options
        )
        if case.hook is not None:
            ddp.register_comm_hook(None, case.hook)
        call = torch.compile(ddp) if flag and case.style == "forward" else ddp

        def step(x: Tensor, takes: str) -> None:
            call(x, takes).sum().backward()

        if flag and case.style == "step":
            step = torch.compile(step)
        known = len(fusion_passes.reports())
        for number, takes in enumerate(case.takes):
            before = _collectives()
            _step(ddp, step, case, number, takes[dist.get_rank() % len(takes)])
            training.collectives.append(_collectives() - before)
            training.graphs.append(len(fusion_passes.reports()) - known)
            training.gradients.append({n: _copy(p.grad) for n, p in ddp.named_parameters()})
            if number not in case.local:
                _zero(ddp, case.zero)
        buckets = [bucket for graph in fusion_passes.report().graphs for bucket in graph.buckets]
        training.names = [bucket.name for bucket in buckets]
    training.traced = counters["compiled_autograd"]["captures"]
    training.warned = [
        str(w.message) for w in caught if issubclass(w.category, fusion_passes.FusionWarning)
    ]
    return training


def _step(
    ddp: DistributedDataParallel,
    step: Callable[[Tensor, str], None],
    case: Case,
    number: int,
    takes: str,
) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randint(-1, 2, (4, models.WIDTH), generator=generator).float()
    with ddp.no_sync() if number in case.local else contextlib.nullcontext():
        step(x, takes)


def _collectives() -> int:
    group: Any = dist.group.WORLD
    number: int = group._get_sequence_number_for_group()
    return number


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _zero(ddp: nn.Module, how: str) -> None:
    for parameter in ddp.parameters():
        if how == "none":
            parameter.grad = None
        elif how == "zero" and parameter.grad is not None:
            parameter.grad.zero_()


def _train_all(cases: dict[str, Case], modes: Sequence[str | None]) -> list[dict[str, Training]]:
    return [{name: train(case, mode) for name, case in cases.items()} for mode in modes]


def assert_same(name: str, ours: Training, eager: Training) -> None:
    for step, (have, want) in enumerate(zip(ours.gradients, eager.gradients, strict=True)):
        for parameter, value in want.items():
            difference = tensor_difference(have[parameter], value, 0.0)
            assert not difference, f"{name}, step {step}, {parameter}: {difference}"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("in turn", "concat", marks=pytest.mark.each_torch),
        ("no_sync", "concat"),
        pytest.param("gradients kept", "coalesced", marks=pytest.mark.each_torch),
    ],
)
def test_as_eager_ddp(run_on_ranks: RUN, name: str, mode: str) -> None:
    _check(run_on_ranks, name, mode)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@pytest.mark.parametrize("name", CASES)
def test_all_cases_as_eager_ddp(run_on_ranks: RUN, name: str, mode: str) -> None:
    _check(run_on_ranks, name, mode)


def _check(run_on_ranks: RUN, name: str, mode: str) -> None:
    for eager, ours in run_on_ranks(2, _train_all, cases={name: CASES[name]}, modes=[None, mode]):
        assert_same(name, ours[name], eager[name])
        assert ours[name].warned == []


@pytest.mark.nightly
def test_as_eager_ddp_on_four_ranks(run_on_ranks: RUN) -> None:
    takes = [["a", "b", "c", ""], ["", "a", "b", "c"], ["a", "a", "b", "b"], ["", "", "", "c"]]
    cases = {"four": Case(takes * 3), "kept": Case(takes * 2, zero="kept")}
    for eager, ours in run_on_ranks(4, _train_all, cases=cases, modes=[None, "concat"]):
        for name in cases:
            assert_same(name, ours[name], eager[name])


@pytest.mark.each_torch
def test_what_is_never_used_costs_nothing(run_on_ranks: RUN) -> None:
    """One graph, and one collective a step, as without the option."""
    cases = {"all": CASES["all are used"], "ab": CASES["one is never used"]}
    for (ours,) in run_on_ranks(2, _train_all, cases=cases, modes=["concat"]):
        for name in cases:
            assert ours[name].graphs == [1, 1, 1], name
            assert ours[name].collectives == [1, 1, 1], name
            assert ours[name].traced == 0, name
            assert [text.split(") ")[1] for text in ours[name].names] == ["bucket 0"], name


def test_branches_are_compiled_once_and_reduced_at_once(run_on_ranks: RUN) -> None:
    """When each rank has seen all branches, each step is one collective, and none compiles."""
    takes = [["a", "b"], ["b", "a"], ["a"], ["b"]]
    case = Case([*takes, *takes, *takes])
    for (ours,) in run_on_ranks(2, _train_all, cases={"": case}, modes=["concat"]):
        settled = 2 * len(takes)
        assert ours[""].collectives[settled:] == [1] * len(takes)
        assert len(set(ours[""].graphs[settled:])) == 1


@torch.compiler.disable
def _unseen(gradient: Tensor) -> None:
    """A hook that breaks the graph of a backward."""


def _train_in_parts(modes: Sequence[str | None]) -> list[Training]:
    original = models.Branching.forward

    def forward(model: models.Branching, x: Tensor, takes: str) -> Tensor:
        out = original(model, x.requires_grad_(), takes)
        out.register_hook(_unseen)
        return model.c(out.relu())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.Branching, "forward", forward)
        return [train(Case(CHANGING[:3], style="backward"), mode) for mode in modes]


def test_a_backward_in_several_graphs_is_reduced_when_it_has_ended(run_on_ranks: RUN) -> None:
    for eager, ours in run_on_ranks(2, _train_in_parts, modes=[None, "concat"]):
        assert_same("in parts", ours, eager)
        (warned,) = ours.warned
        assert (
            "it broke into several graphs, and with find_unused_parameters=True it must be"
            in warned
        )


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


@pytest.mark.nightly
def test_a_static_graph_that_is_promised_later(run_on_ranks: RUN) -> None:
    for eager, ours in run_on_ranks(2, _promised_later, modes=[None, "concat"]):
        assert_same("promised later", ours, eager)


def _promised_later(modes: Sequence[str | None]) -> list[Training]:
    original = DistributedDataParallel.__init__

    def promising(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        ddp._set_static_graph()

    case = replace(CASES["a static graph"], options={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", promising)
        return [train(case, mode) for mode in modes]
