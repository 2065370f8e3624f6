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

_AVERAGES_FROM: Final = (2, 30)
"""The first version of NCCL that averages what lies in registered memory without a copy, by its
symmetric kernels. Before, none does: these kernels, NVLink SHARP and network cards use registered
memory for sums alone, and rings and trees do not use it for an all-reduce in place
(``ncclSymkImplemented`` and coll_reg.cc, read in 2.27.3 to 2.30.7)."""


def why_not_registered(
    group: ProcessGroup, devices: Collection[torch.device], *, averages: bool
) -> str:
    """Why memory on these devices cannot be registered with a group's backend, or would be in vain
    (``averages``: the user asks for collectives that average), and what to do: the rest of a
    sentence that begins with what the user has asked for. Empty if it can."""
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
    version = torch.cuda.nccl.version() if averages else _AVERAGES_FROM
    if version < _AVERAGES_FROM:
        return (
            f"needs gradients that are summed: NCCL {'.'.join(map(str, version))} averages from "
            "copies, and FusionConfig.scaling is 'collective'. Set scaling = 'auto'"
        )
    return ""


class RegisteredMemory:
    """One piece of memory of NCCL (``data``: bytes), alone in a pool of its own, registered as
    symmetric on the device to which the group is bound.

    All ranks of the group must allocate it, of the same size, for NCCL wants each bucket at the
    same offset on all ranks. It is deregistered when it is freed, or its group destroyed.

    Raises:
        RuntimeError: this rank cannot allocate it; others may have done so.
    """

    _end: weakref.finalize[..., Any]

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int) -> None:
        deregister_freed()
        self.group = group
        self._backend: Any = group._get_backend(device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
            with torch.cuda.use_mem_pool(self._pool, device):
                self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def register(self) -> None:
        """Have NCCL register the memory: a collective, to which no rank must come alone."""
        device = self.data.device
        with torch.cuda.device(device):
            self._backend.register_mem_pool(self._pool, symm=True)
        # Tensors may outlive the pool: torch frees their memory with the last of them.
        self._end = weakref.finalize(self, _deregister, self._backend, self._pool, device)
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
    """The garbage collector may call this while a CUDA graph is captured, which a synchronization
    would break. The memory waits for :func:`deregister_freed` then."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _freed.append((backend, pool, device))
        return
    torch.get_device_module(device).synchronize(device)  # Nothing may be on its way from there.
    backend.deregister_mem_pool(pool)


def deregister_freed() -> None:
    """Deregister the memory that was freed while a CUDA graph was captured, unless one is now."""
    for _ in range(len(_freed)):
        _deregister(*_freed.pop(0))


_freed: Final = process_state.keep(
    list[tuple[Any, Any, torch.device]](),
    "the registered memory that was freed while a CUDA graph was captured: backend, pool, device",
    Lifetime.GROUP,
    reset=lambda _: None,
)

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
    deregister_freed()
    _torchs_shutdown(group)


def _abort(group: ProcessGroup) -> None:
    """``ProcessGroup.abort``, which deregisters by itself, and must not wait."""
    for memory in _of(group):
        memory.forget()
    _freed[:] = [each for each in _freed if each[0] is not group._get_backend(each[2])]
    _torchs_abort(group)
