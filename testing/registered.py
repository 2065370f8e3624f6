"""Host memory in which a module trains with buckets at fixed addresses, like buckets that NCCL has
registered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fusion_passes.ddp import attachment
from fusion_passes.reducer import registered


@dataclass
class Registry:
    """The registrations that a rank requested from NCCL.

    Attributes:
        sizes: sizes of the allocations, in bytes, in order.
        data: the allocated memory.
        registered: sizes of the registered memory.
        ended: number of deregistrations.
    """

    sizes: list[int] = field(default_factory=list)
    data: list[Tensor] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    ended: int = 0


@contextlib.contextmanager
def registered_by_nobody() -> Iterator[Registry]:
    """Let ``FusionConfig(memory="registered")`` use host memory."""
    registry = Registry()

    class Memory:
        def __init__(self, group: Any, device: torch.device, nbytes: int) -> None:
            del group
            # NaN in each dtype: memory that was not written must not be all-reduced.
            self.data = torch.full((nbytes,), 255, dtype=torch.uint8, device=device)
            registry.sizes.append(nbytes)
            registry.data.append(self.data)

        def register(self) -> None:
            registry.registered.append(self.data.numel())

        def deregister(self) -> None:
            registry.ended += 1

    with (
        mock.patch.object(attachment, "why_not_registered", return_value=""),
        mock.patch.object(registered, "RegisteredMemory", Memory),
    ):
        yield registry
