"""Process groups in a single process: a fake one of any size, for tests that read graphs and
generated code but no numbers, and one over Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(world_size: int = 2, rank: int = 0, *, has_kernels: bool = False) -> Iterator[None]:
    """Create a default process group whose collectives return immediately and change nothing.
    Unless ``has_kernels``, generated kernels do nothing either (see :func:`without_kernels`)."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with contextlib.nullcontext() if has_kernels else without_kernels():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Replace compiled C++ kernels by functions that do nothing.

    The C++ compiler takes most of the time of a test that only reads a graph and its code. The code
    that was loaded in the block is dropped at its end, so that no other test runs it.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    with mock.patch.object(AsyncCompile, "cpp_pybinding", _compile_nothing):
        try:
            yield
        finally:
            PyCodeCache.cache_clear()


def _compile_nothing(*_: object) -> Any:
    return lambda *_: None


_last_ended: Final[list[dist.ProcessGroup]] = []


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Create a default process group over Gloo that contains only this process.

    The group is freed when the next one ends. Freeing a group waits for Gloo's threads while it
    holds the GIL, which deadlocks if one of these threads is about to free its last collective, as
    right after eager DDP's last backward (docs/decisions.md).
    """
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.group.WORLD
    assert group is not None, "it was just created"
    try:
        yield
    finally:
        _last_ended[:] = [group]
        dist.destroy_process_group()


def two_layers(width: int = 4) -> nn.Sequential:
    """Two linear layers: the smallest module with several gradients to fuse."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
