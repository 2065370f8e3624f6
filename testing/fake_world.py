"""A process group of any size in one process: graphs and generated code, but no numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(world_size: int = 2, rank: int = 0) -> Iterator[None]:
    """Default process group in which collectives return at once and change nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Default process group of this process alone, over Gloo, which averages."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def two_layers(width: int = 4) -> nn.Sequential:
    """Four gradients: the smallest module whose fusion is worth looking at."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
