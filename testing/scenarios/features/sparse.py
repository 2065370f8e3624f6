"""Sparse embeddings: gradients that are rows, averaged apart from the buckets of the other
gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from testing.models import OUTPUTS, WIDTH, Batch, fill_whole
from testing.scenarios.loop import train
from testing.scenarios.run import Run, plain_name

ROWS = 16


class Tables(nn.Module):
    """Exact. Two tables, then layers. A step may skip the second table."""

    def __init__(self, *, is_sparse: bool = True, **of_first: Any) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=is_sparse, **of_first)
        self.second = nn.EmbeddingBag(ROWS, WIDTH, sparse=is_sparse, mode="sum")
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUTPUTS)
        fill_whole(self)

    def forward(self, ids: Tensor, takes: str) -> Tensor:
        x = self.first(ids).sum(1)
        if takes:
            offsets = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
            x = x + self.second(ids.reshape(-1), offsets)
        out: Tensor = self.last(self.layer(x).relu())
        return out


def tables(
    run: Run,
    *,
    takes: str = "b b b b",
    is_joined: bool = False,
    by_initial: bool = True,
    is_dense: bool = False,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    of_first: Mapping[str, Any] = MappingProxyType({}),
    **loop: Any,
) -> None:
    """Train two tables with a different number of rows on each rank.

    Args:
        takes: ``b`` for ranks that use the second table, as in :class:`Loop`.
        is_joined: whether ranks have different numbers of inputs, and are joined.
        by_initial: as in :func:`testing.scenarios.features.joining.uneven`.
        is_dense: whether eager DDP's tables are dense, because it cannot do this with sparse ones.
        ddp: options of ``DistributedDataParallel``.
        of_first: options of the first table.
        loop: further fields of the loop.
    """
    model = run.ddp(Tables(is_sparse=run.is_fused or not is_dense, **of_first), **ddp)

    def note_rows(_: nn.Module, __: bool) -> None:
        """Record which rows sparse gradients have: the same as eager DDP's, bitwise."""
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and not is_dense:
                rows = gradient.coalesce()
                said = gradient.is_coalesced(), rows.indices().tolist(), rows.values().tolist()
                run.note(f"{len(run.backwards)}: {plain_name(name)}", said)

    loop = {"moves": False, "takes": takes, "draw": _ids, "sizes": (2, 2, 0, 2), **loop}
    steps = {"steps": 2 + dist.get_rank()} if is_joined else {}
    joined = functools.partial(model.join, divide_by_initial_world_size=by_initial)
    with joined() if is_joined else contextlib.nullcontext():
        train(run, model, before_note=note_rows, **steps, **loop)


def _ids(generator: torch.Generator, size: int) -> Batch:
    """Row numbers with as many columns as the size and the rank give: none on rank 0 if the size is
    0."""
    ids = torch.randint(0, ROWS, (3, size + dist.get_rank()), generator=generator)
    return ids, torch.randint(-2, 3, (3, OUTPUTS), generator=generator).float()
