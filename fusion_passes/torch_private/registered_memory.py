"""Memory that NCCL has allocated and registered, so that it can send it as it lies.

A backend's ``mem_allocator``, ``register_mem_pool`` and ``deregister_mem_pool`` have no
documentation. Read on torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Final

import torch

from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import ProcessGroup


def why_not_registered(group: ProcessGroup, devices: Collection[torch.device]) -> str:
    """Why memory on these devices cannot be registered with a group's backend, and what to do: the
    rest of a sentence that begins with what the user has asked for. Empty if it can."""
    device, *others = sorted(set(devices), key=str)
    backend: Any = group._get_backend(device)
    if backend.name() != "nccl":
        return (
            f"needs a process group of NCCL, and this one sends tensors on {device.type} over "
            f"{backend.name()}. Give init_process_group backend='nccl'"
        )
    if not hasattr(backend, "register_mem_pool"):
        return (
            f"needs register_mem_pool of the backend, which {type(backend).__name__} of torch "
            f"{torch.__version__} has not. Unset TORCH_DISTRIBUTED_DEBUG, or take another torch"
        )
    if group.bound_device_id is None:
        return (
            "needs a process group that is bound to its GPU, so that NCCL is connected before, and "
            "device_id of this one is None. Give init_process_group (or new_group) device_id"
        )
    if others:
        return (
            f"needs parameters on one GPU, and they are on {', '.join(map(str, (device, *others)))}"
            ". Move them to one"
        )
    return ""


class RegisteredMemory:
    """One piece of memory of NCCL (``data``: bytes), alone in a pool of its own, registered as
    symmetric on the device to which the group is bound.

    All ranks of the group must make it at the same time, of the same size: to register is a
    collective, and NCCL wants each bucket at the same offset on all ranks. It is deregistered when
    it is freed, or its group destroyed.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int) -> None:
        backend: Any = group._get_backend(device)
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool, device):
                self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
            backend.register_mem_pool(pool, symm=True)
        self.group = group
        # Tensors may outlive the pool: torch frees their memory with the last of them.
        self._end = weakref.finalize(self, _deregister, backend, pool, device)
        _alive.add(self)
        ProcessGroup.shutdown = _shutdown  # type: ignore[method-assign, assignment]
        ProcessGroup.abort = _abort  # type: ignore[method-assign, assignment]

    def deregister(self) -> None:
        """Have NCCL forget the memory, which stays what it is; only on this rank."""
        self._end()

    def forget(self) -> None:
        """NCCL has forgotten the memory itself."""
        self._end.detach()


def _deregister(backend: Any, pool: Any, device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)  # Nothing may be on its way from there.
    backend.deregister_mem_pool(pool)


_alive: Final = process_state.keep(
    weakref.WeakSet[RegisteredMemory](),
    "the memory that is registered, for the end of its process group",
    Lifetime.MODULE,
    reset=lambda _: None,
)

# A pool that is registered with a communicator that is gone would fail when it is freed: torch
# tells the communicator (2.11 to 2.14).
_torchs_shutdown: Final = ProcessGroup.shutdown
_torchs_abort: Final = ProcessGroup.abort


def _of(group: ProcessGroup) -> list[RegisteredMemory]:
    return [memory for memory in _alive if memory.group is group]


def _shutdown(group: ProcessGroup) -> None:
    """``ProcessGroup.shutdown``, which ``destroy_process_group`` calls."""
    for memory in _of(group):
        memory.deregister()
    _torchs_shutdown(group)


def _abort(group: ProcessGroup) -> None:
    """``ProcessGroup.abort``, which deregisters by itself, and must not wait."""
    for memory in _of(group):
        memory.forget()
    _torchs_abort(group)
