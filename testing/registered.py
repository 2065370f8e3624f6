"""Fakes of NCCL's memory registration, for machines without NCCL: a backend that records its calls,
and host memory in which a module trains with buckets at fixed addresses, like registered ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from fusion_passes.ddp import attachment
from fusion_passes.reducer import registered

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
