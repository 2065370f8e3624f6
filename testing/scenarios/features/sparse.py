"""Sparse embeddings: gradients that are rows, averaged beside the buckets of the rest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, fill_whole
from testing.scenarios.features.unused import branches_of
from testing.scenarios.loop import Zero, clear_gradients
from testing.scenarios.run import Run, plain_name, synced_if

ROWS = 16


class Tables(nn.Module):
    """Exact. Two tables, the second of which a step may leave out, and layers behind them."""

    def __init__(self, *, is_sparse: bool = True, **of_first: Any) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=is_sparse, **of_first)
        self.second = nn.EmbeddingBag(ROWS, WIDTH, sparse=is_sparse, mode="sum")
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUTPUTS)
        fill_whole(self)

    def forward(self, ids: Tensor, takes_second: bool) -> Tensor:
        x = self.first(ids).sum(1)
        if takes_second:
            offsets = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
            x = x + self.second(ids.reshape(-1), offsets)
        out: Tensor = self.last(self.layer(x).relu())
        return out


def tables(
    run: Run,
    *,
    takes: str = "b b b b",
    local: Sequence[int] = (),
    zero: Zero = "none",
    is_inside: bool = False,
    is_joined: bool = False,
    by_initial: bool = True,
    is_dense: bool = False,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    of_first: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Train two tables, each rank with another number of rows.

    Args:
        run: where it is noted.
        takes: which ranks use the second table, by step, as of
            :func:`testing.scenarios.features.unused.branches_of`.
        local: the steps that run under ``no_sync``, after which gradients stay.
        zero: what becomes of gradients after the other steps, as of a :class:`Loop`.
        is_inside: whether the whole step is compiled.
        is_joined: whether ranks have another number of inputs, and are joined.
        by_initial: as of :func:`testing.scenarios.features.joining.uneven`.
        is_dense: whether eager DDP's tables are dense: with sparse ones it cannot do this.
        ddp: options of ``DistributedDataParallel``.
        of_first: options of the first table.
    """
    model = run.ddp(Tables(is_sparse=run.is_fused or not is_dense, **of_first), **ddp)
    forward, rank = model if is_inside else run.compile(model), dist.get_rank()

    def backward(ids: Tensor, takes_second: bool) -> None:
        forward(ids, takes_second).sum().backward()

    step = run.compile(backward) if is_inside else backward
    steps = branches_of(takes)
    joined = functools.partial(model.join, divide_by_initial_world_size=by_initial)
    with joined() if is_joined else contextlib.nullcontext():
        for number, each in enumerate(steps[: 2 + rank] if is_joined else steps):
            synced = number not in local
            with synced_if(model, synced):
                step(_ids(number, rank).to(run.device), bool(each[rank % len(each)]))
            run.note_backward(model, synced=synced)
            if not is_dense:
                _note_rows(run, model, number)
            if synced:
                clear_gradients(model, zero, model.zero_grad)


def _note_rows(run: Run, model: nn.Module, number: int) -> None:
    """Which rows sparse gradients have: eager DDP's, in every bit."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            rows = gradient.coalesce()
            said = gradient.is_coalesced(), rows.indices().tolist(), rows.values().tolist()
            run.note(f"{number}: {plain_name(name)}", said)


def _ids(step: int, rank: int) -> Tensor:
    """Of another size on each rank; in the third step, the last rank has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    columns = 0 if step == 2 and rank == dist.get_world_size() - 1 else 2 + rank
    return torch.randint(0, ROWS, (3, columns), generator=generator)
