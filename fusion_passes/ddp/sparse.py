"""Averages sparse gradients as rows: those of ``nn.Embedding(sparse=True)`` and
``nn.EmbeddingBag(sparse=True)``.

A rank has gradients for the rows of a table that its batch names, others and another number of them
than the other ranks. So they are no part of a bucket: when the backward has ended, the ranks gather
how many rows each has, then the rows' indices, then their values, and each adds them up. That is
what Gloo does for eager DDP, one table after the other; here it is done once for all tables of a
dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.launches import Collective
from fusion_passes.ddp.by_hand import Job
from fusion_passes.ddp.managed_module import embeddings_with_rows
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.naming import rows_name
from fusion_passes.graph.collectives import ALL_GATHER, WAIT
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.profiling import range_in_profile
from fusion_passes.torch_private.stand_ins import AverageOfSome

_NO_GRADIENT: Final = -1
"""In the place of a number of rows: the rank has no gradient of the table."""


def dense_parameters(ddp: DistributedDataParallel) -> dict[int, nn.Parameter]:
    """The parameters of a module that are trained now and have dense gradients, by number."""
    dense, parameters = registry.module_of(ddp).dense, parameters_of(ddp)
    return {n: parameters[n] for n in dense if parameters[n].requires_grad}


@dataclass(frozen=True)
class SentRows:
    """The rows of some tables, on their way to the other ranks.

    Attributes:
        item: which tables, and the dtype in which values are sent.
        local: the gradients of this rank, divided and coalesced; ``None`` where it has none.
        counts: ``[ranks, tables]``, to be waited for: how many rows each rank has.
    """

    job: Job
    item: Collective
    local: list[Tensor | None]
    counts: Tensor

    @classmethod
    def launch(cls, job: Job, item: Collective) -> SentRows:
        """Begin to gather how many rows each rank has.

        Raises:
            RuntimeError: the gradient of a table is not sparse, as with eager DDP.
        """
        local = [_local(job, number) for number in item.parameters]
        numbers = [_NO_GRADIENT if g is None else g.values().shape[0] for g in local]
        device = parameters_of(job.ddp)[item.parameters[0]].device
        return cls(job, item, local, _gather(job, torch.tensor(numbers, device=device)))

    def finish(self) -> None:
        """Gather the rows, add them up, and give the gradients their new values."""
        counts: list[list[int]] = _wait(self.job, self.counts).reshape(-1, len(self.local)).tolist()
        tables = [parameters_of(self.job.ddp)[number] for number in self.item.parameters]
        widths = [table[:1].numel() if len(table) else 0 for table in tables]
        rows = [[max(count, 0) for count in mine] for mine in counts]
        values = [[n * width for n, width in zip(mine, widths, strict=True)] for mine in rows]
        found = [gradient for gradient in self.local if gradient is not None]
        dtype: torch.dtype = getattr(torch, self.item.dtype)
        indices_of = self._pieces([g.indices()[0] for g in found], rows, torch.int64)
        values_of = self._pieces([g.values().reshape(-1).to(dtype) for g in found], values, dtype)
        for place, table in enumerate(tables):
            if any(mine[place] != _NO_GRADIENT for mine in counts):
                pairs = zip(indices_of, values_of, strict=True)
                self._give(table, _sum(table, [(i[place], v[place]) for i, v in pairs]))
            self.job.participant.late.pop(self.item.parameters[place], None)

    def _pieces(
        self, mine: list[Tensor], numels: list[list[int]], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """What each rank has for each table: ``[ranks][tables][n]``.

        Args:
            mine: what this rank has, flat.
            numels: how many elements each rank has for each table.
            dtype: of them.
        """
        longest = max(map(sum, numels))
        sent = torch.zeros(longest, dtype=dtype, device=self.counts.device)
        if mine:
            own = torch.cat(mine)
            sent[: len(own)] = own
        if not longest:  # All ranks know.
            return [list(sent.split(each)) for each in numels]
        # Numbers of two halves: complex ones are none that every backend sends.
        real = torch.view_as_real(sent) if dtype.is_complex else sent
        gathered = _wait(self.job, _gather(self.job, real)).reshape(-1, *real.shape)
        whole = torch.view_as_complex(gathered) if dtype.is_complex else gathered
        return [list(whole[rank][: sum(each)].split(each)) for rank, each in enumerate(numels)]

    def _give(self, table: nn.Parameter, average: Tensor) -> None:
        if not self.job.has_inputs:
            return
        if table.grad is None:
            table.grad = average
        elif table.grad.layout is torch.strided:
            table.grad.copy_(average.to_dense())
        else:
            table.grad.copy_(average)  # A detached one would be written alone.


def _local(job: Job, number: int) -> Tensor | None:
    """The gradient of a table on this rank, divided, each row once."""
    table = parameters_of(job.ddp)[number]
    gradient = table.grad
    if gradient is None or not job.has_inputs:
        return None
    gradient = gradient.detach()
    if gradient.layout is not torch.sparse_coo:
        if not _is_renormalized(job.ddp, table):
            raise RuntimeError(
                f"Expected variable to have sparse gradient: {job.module.parameters[number]} of "
                f"{job.module.label} belongs to an embedding with sparse=True, and its gradient is "
                "dense. It is used by another layer too, which eager DDP refuses as well: "
                "construct the embedding with sparse=False."
            )
        gradient = gradient.to_sparse(1)
    # Divided first, as in eager DDP, to the last bit.
    return gradient.div(_divisor(job)).coalesce()


def _is_renormalized(ddp: DistributedDataParallel, table: nn.Parameter) -> bool:
    """Whether an embedding changes the table in its forward: if that is compiled, the gradient is
    dense, with DDP or without it (torch 2.11 to 2.15)."""
    return any(
        module.max_norm is not None and any(table is p for p in module.parameters(recurse=False))
        for module in embeddings_with_rows(ddp.module)
    )


def _divisor(job: Job) -> float:
    group = registry.group_of(job.ddp)
    return group.divisor() if isinstance(group, AverageOfSome) else job.module.world_size


def _gather(job: Job, tensor: Tensor) -> Tensor:
    """Begin to gather a tensor of equal size from each rank, one after the other: to be waited
    for."""
    size, group = job.module.world_size, job.ddp.process_group
    if meeting_of(job.module.group_name) is None:
        return torch.cat([tensor] * size)
    with range_in_profile(f"{rows_name(job.module.group_name)} launch"):
        gathered: Tensor = ALL_GATHER(tensor.contiguous(), size, group.group_name)
    return gathered


def _wait(job: Job, gathered: Tensor) -> Tensor:
    with range_in_profile(f"{rows_name(job.module.group_name)} wait"):
        result: Tensor = WAIT(gathered)
    return result


def _sum(table: nn.Parameter, pieces: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of sparse gradients of a table: in the order of the ranks, as Gloo adds them.

    Args:
        table: whose gradients they are.
        pieces: of each rank the indices of its rows, each once and in order, and their values.
    """
    total: Tensor | None = None
    for indices, values in pieces:
        piece = torch.sparse_coo_tensor(
            indices[None],
            values.to(table.dtype).reshape(len(indices), *table.shape[1:]),
            table.shape,
            check_invariants=False,  # They are those of gradients.
            is_coalesced=True,
        )
        total = piece if total is None else total.add_(piece)
    assert total is not None, "there is a rank"
    return total.coalesce()


def group_by_dtype(job: Job, numbers: list[int], dtypes: list[str], place: int) -> list[Collective]:
    """Group tables whose rows travel together.

    Args:
        job: their module.
        numbers: of the tables.
        dtypes: in which their values are sent.
        place: of the first of these among what is launched.
    """
    devices = [str(parameters_of(job.ddp)[number].device) for number in numbers]
    keyed = sorted(zip(dtypes, devices, numbers, strict=True))
    groups = itertools.groupby(keyed, key=lambda entry: entry[:2])
    return [
        Collective("rows", dtype, tuple(number for *_, number in members), place + index)
        for index, ((dtype, _), members) in enumerate(groups)
    ]
