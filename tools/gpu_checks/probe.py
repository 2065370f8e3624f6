"""Whether NCCL takes two ranks on one GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpu_checks.results import Row
from gpu_checks.sites import Note, Site

ELEMENTS = 2**20


def all_reduce(site: Site, note: Note) -> None:
    """Average over all ranks, and sum.

    Raises:
        RuntimeError: a result is wrong; or NCCL's own error.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(site.device, torch.cuda.current_device() if site.device == "cuda" else 0)
    operations = (
        (dist.ReduceOp.SUM, ranks * (ranks + 1) / 2),
        (dist.ReduceOp.AVG, (ranks + 1) / 2),
    )
    for operation, expected in operations:
        values = torch.full([ELEMENTS], rank + 1.0, device=device)
        dist.all_reduce(values, operation)
        if not torch.all(values == expected):
            raise RuntimeError(f"{operation} of two ranks is {values[0].item()}, not {expected}")
    note(Row("two ranks on one GPU", words=f"{site.backend} reduces them"))
