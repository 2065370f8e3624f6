"""Fakes of NCCL's memory registration, for machines without NCCL: a backend and a process group
that record the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")


class Backend:
    """A backend that records its calls in order."""

    mem_allocator = "NCCL's allocator"

    def __init__(self, name: str = "nccl") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._name = name

    def name(self) -> str:
        return self._name

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        self.calls.append(("register", pool, symm))

    def deregister_mem_pool(self, pool: Any) -> None:
        self.calls.append(("deregister", pool))


class Group:
    """A process group with a :class:`Backend`."""

    def __init__(self, backend: Any, bound: torch.device | None = CPU) -> None:
        self.backend = backend
        self.bound_device_id = bound

    def _get_backend(self, device: torch.device) -> Any:
        del device
        return self.backend


@contextlib.contextmanager
def on_the_host(backend: Backend) -> Iterator[None]:
    """Replace pools of GPU memory by host memory. The backend records the calls on them."""

    @contextlib.contextmanager
    def allocating_in(pool: Any, device: Any) -> Iterator[None]:
        def allocate(size: Any, **options: Any) -> Tensor:
            backend.calls.append(("allocate", pool, size))
            return torch.zeros(size, **options)

        backend.calls.append(("enter", pool, device))
        with mock.patch.object(torch, "empty", allocate):
            yield
        backend.calls.append(("leave", pool))

    fakes: dict[str, Any] = {
        "device": lambda _: contextlib.nullcontext(),
        "MemPool": lambda allocator: f"a pool of {allocator}",
        "use_mem_pool": allocating_in,
    }
    with mock.patch.multiple(torch.cuda, **fakes):
        yield
