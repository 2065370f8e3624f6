"""Sparse embeddings: their gradients are averaged as rows beside the buckets of the rest, and are
those of eager DDP in every bit, sparse and coalesced."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes.reducer.reducer import reducer_of
from testing import models
from testing.scenarios.both_ways import tensor_difference
from tests.reducer.test_reducer import sequence_number

RUN = Callable[..., list[Any]]
ROWS = 16
SMALL_MB = 4 * models.OUTPUTS * (models.WIDTH + 1) / 2**20
"""The last layer is a bucket, and of the other one each parameter."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        local: the steps that run under ``no_sync``.
        zero: what becomes of gradients after a step that does not.
        inside: whether the backward is inside of the compiled function.
        takes: whether each rank uses the second table, step by step.
        uneven: whether ranks have another number of inputs, and are joined.
        flag: of ``ddp_fusion``.
        options: of DDP.
        is_dense: whether tables of the training beside it are dense: eager DDP cannot do this.
        padding: the first table's ``padding_idx``.
        max_norm: likewise. Torch makes dense gradients of it, if the forward is compiled.
    """

    local: Sequence[int] = ()
    zero: Literal["none", "zero", "kept"] = "none"
    inside: bool = False
    takes: Sequence[Sequence[bool]] = ((True,),) * 4
    uneven: bool = False
    flag: Any = "concat"
    options: dict[str, Any] = field(default_factory=dict)
    is_dense: bool = False
    padding: int | None = None
    max_norm: float | None = None


CASES = {
    "plain": Case(options={"bucket_cap_mb": SMALL_MB}),
    "coalesced": Case(flag="coalesced", inside=True),
    "accumulated": Case(local=(0, 2), zero="kept"),
    "zeroed": Case(zero="zero"),
    "padding": Case(padding=1),
    "all used": Case(options={"find_unused_parameters": True}),
    "static graph": Case(options={"static_graph": True}),
    "unused": Case(
        takes=((True, True), (True, False), (False, False), (False, True), (True, True)),
        options={"find_unused_parameters": True},
        is_dense=True,
    ),
    "max norm": Case(max_norm=0.5, is_dense=True),
    "joined": Case(uneven=True),
}


class Tables(nn.Module):
    """Exact. Two tables, and layers behind them."""

    def __init__(self, case: Case, *, is_sparse: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"padding_idx": case.padding, "max_norm": case.max_norm}
        self.first = nn.Embedding(ROWS, models.WIDTH, sparse=is_sparse, **options)
        self.second = nn.EmbeddingBag(ROWS, models.WIDTH, sparse=is_sparse, mode="sum")
        self.layer = nn.Linear(models.WIDTH, models.WIDTH)
        self.last = nn.Linear(models.WIDTH, models.OUTPUTS)
        models.fill_whole(self)

    def forward(self, ids: Tensor, takes: bool) -> Tensor:
        x = self.first(ids).sum(1)
        if takes:
            offsets = torch.arange(ids.shape[0]) * ids.shape[1]
            x = x + self.second(ids.reshape(-1), offsets)
        out: Tensor = self.last(self.layer(x).relu())
        return out


@dataclass
class Training:
    """What came of a case on a rank."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    logged: dict[str, Any] = field(default_factory=dict)


def train(case: Case, *, flagged: bool) -> Training:
    from fusion_passes.state import process_state

    torch._dynamo.reset()
    process_state.reset()
    training, rank = Training(), dist.get_rank()
    flag = case.flag if flagged else None
    with inductor_config.patch(ddp_fusion=flag), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Tables(case, is_sparse=flagged or not case.is_dense)
        ddp = DistributedDataParallel(model, **case.options)
        call = torch.compile(ddp) if flagged and not case.inside else ddp

        def step(ids: Tensor, takes: bool) -> None:
            call(ids, takes).sum().backward()

        if flagged and case.inside:
            step = torch.compile(step)
        takes = case.takes[: 2 + rank] if case.uneven else case.takes
        with ddp.join() if case.uneven else contextlib.nullcontext():
            for number, uses in enumerate(takes):
                before = sequence_number()
                with ddp.no_sync() if number in case.local else contextlib.nullcontext():
                    step(_ids(number, rank), uses[rank % len(uses)])
                training.collectives.append(sequence_number() - before)
                training.gradients.append({n: _copy(p.grad) for n, p in model.named_parameters()})
                if number not in case.local:
                    _zero(model, case.zero)
        training.logged = ddp._get_ddp_logging_data()
        if flagged:
            layout = reducer_of(ddp).layout
            assert layout is not None
            training.buckets = [len(b.numbers) for b in layout.buckets if not b.is_sparse]
    training.warned = [
        str(w.message) for w in caught if issubclass(w.category, fusion_passes.FusionWarning)
    ]
    return training


def _ids(step: int, rank: int) -> Tensor:
    """Of another size on each rank; in the third step, the last rank has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    columns = 0 if step == 2 and rank == dist.get_world_size() - 1 else 2 + rank
    return torch.randint(0, ROWS, (3, columns), generator=generator)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _zero(model: nn.Module, how: str) -> None:
    for parameter in model.parameters():
        if how == "none":
            parameter.grad = None
        elif how == "zero" and parameter.grad is not None:
            parameter.grad.zero_()


def difference(
    have: Tensor | None, want: Tensor | None, *, is_dense: bool, eps: float
) -> str | None:
    if have is None or want is None or is_dense:
        return tensor_difference(have.to_dense() if have is not None else None, want, 0.0)
    if have.layout is not want.layout:
        return f"{have.layout} is not {want.layout}"
    if have.layout is torch.strided:
        return tensor_difference(have, want, eps)
    if have.is_coalesced() != want.is_coalesced():
        return f"coalesced: {have.is_coalesced()} is not {want.is_coalesced()}"
    have, want = have.coalesce(), want.coalesce()
    indices = tensor_difference(have.indices()[0], want.indices()[0], 0.0)
    return indices or tensor_difference(have.values(), want.values(), 0.0)


def train_both(cases: dict[str, Case]) -> dict[str, tuple[Training, Training]]:
    return {
        name: (train(case, flagged=False), train(case, flagged=True))
        for name, case in cases.items()
    }


def check(run_on_ranks: RUN, names: Sequence[str], ranks: int = 2) -> list[dict[str, Training]]:
    """The trainings under the flag on each rank, whose gradients must be eager DDP's."""
    cases = {name: CASES[name] for name in names}
    found = []
    for rank, both in enumerate(run_on_ranks(ranks, train_both, cases=cases)):
        for name, (eager, ours) in both.items():
            pairs = zip(ours.gradients, eager.gradients, strict=True)
            for step, (have, want) in enumerate(pairs):
                for parameter, value in want.items():
                    is_dense = cases[name].is_dense
                    # Gloo divides a sum of dense gradients, and eager DDP its summands.
                    eps = 4.0 if ranks == 3 else 0.0
                    said = difference(have[parameter], value, is_dense=is_dense, eps=eps)
                    assert not said, f"{name}, rank {rank}, step {step}, {parameter}: {said}"
        found.append({name: ours for name, (_, ours) in both.items()})
    return found


def test_as_eager_ddp(run_on_ranks: RUN) -> None:
    for ours in check(run_on_ranks, ["accumulated", "max norm", "unused"]):
        assert all(training.warned == [] for training in ours.values())
        assert ours["accumulated"].buckets == ours["max norm"].buckets == [4]
        assert ours["accumulated"].collectives[::2] == [0, 0]


@pytest.mark.xdist_group("three ranks")
def test_on_three_ranks(run_on_ranks: RUN) -> None:
    """Each table is a bucket of its own, of rows: a collective or two, as Gloo sends them."""
    for ours in check(run_on_ranks, ["plain", "joined"], ranks=3):
        assert ours["plain"].warned == ours["joined"].warned == []
        assert ours["plain"].buckets == [2, 2]
        assert len(set(ours["plain"].collectives[1:])) == 1
        logged = ours["plain"].logged
        assert logged["num_buckets_reduced"] == 2
        order = logged["prev_iteration_grad_ready_order_indices"]
        assert set(map(int, order.split(", "))) == {2, 3, 4, 5}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_all_as_eager_ddp(run_on_ranks: RUN, name: str) -> None:
    for ours in check(run_on_ranks, [name]):
        assert ours[name].warned == []
