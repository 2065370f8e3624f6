"""Memory that NCCL has allocated and registered, so that NCCL can send from it without a copy.

A backend's ``mem_allocator``, ``register_mem_pool`` and ``deregister_mem_pool`` have no
documentation. Their code was read on torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Final

import torch

from fusion_passes.torch_private import ProcessGroup

_AVERAGES_FROM: Final = (2, 30)
"""The first version of NCCL that averages gradients in registered memory without a copy, by its
symmetric kernels. Earlier versions do not: their symmetric kernels, NVLink SHARP and network cards
use registered memory for sums alone, and rings and trees do not use it for an all-reduce in place
(``ncclSymkImplemented`` and coll_reg.cc, read in 2.27.3 to 2.30.7)."""


def why_not_registered(
    group: ProcessGroup, devices: Collection[torch.device], *, averages: bool
) -> str:
    """Why memory on these devices cannot be registered with a group's backend, or would be of no
    use (``averages``: the user asks for collectives that average), and the remedy. The text
    completes a sentence that begins with the user's option. Empty if the memory can be
    registered."""
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
    """One allocation of NCCL's memory (``data``: bytes) in a memory pool of its own, registered as
    symmetric on the device to which the group is bound.

    All ranks of the group must allocate the memory, with the same size, because NCCL needs each
    bucket at the same offset on all ranks. The memory is deregistered when it is freed, or when its
    group is destroyed.

    Raises:
        RuntimeError: this rank cannot allocate the memory; other ranks may have done so.
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
        """Have NCCL register the memory: a collective, which all ranks of the group must run."""
        device = self.data.device
        with torch.cuda.device(device):
            self._backend.register_mem_pool(self._pool, symm=True)
        # Tensors may outlive the pool: torch frees the memory with the last of these tensors.
        self._end = weakref.finalize(self, _deregister, self._backend, self._pool, device)
        _alive.add(self)
        ProcessGroup.shutdown = _shutdown  # type: ignore[method-assign, assignment]
        ProcessGroup.abort = _abort  # type: ignore[method-assign, assignment]

    def deregister(self) -> None:
        """Have NCCL deregister the memory on this rank only. The memory stays allocated."""
        self._end()

    def forget(self) -> None:
        """Cancel the deregistration: NCCL has deregistered the memory by itself."""
        self._end.detach()


def _deregister(backend: Any, pool: Any, device: torch.device) -> None:
    """Deregister a pool. If the garbage collector calls this while a CUDA graph is captured, which
    a synchronization would break, the pool waits for :func:`deregister_freed`."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _freed.append((backend, pool, device))
        return
    torch.get_device_module(device).synchronize(device)  # No collective may still read or write it.
    backend.deregister_mem_pool(pool)


def deregister_freed() -> None:
    """Deregister memory that was freed during the capture of a CUDA graph, unless one is captured
    now."""
    for _ in range(len(_freed)):
        _deregister(*_freed.pop(0))


_freed: Final = list[tuple[Any, Any, torch.device]]()
"""The registered memory that was freed while a CUDA graph was captured: backend, pool, device."""

_alive: Final = weakref.WeakSet[RegisteredMemory]()
"""The memory that is registered, for the end of its process group."""

# When a registered pool is freed, torch calls its communicator (2.11 to 2.14). If the communicator
# was destroyed, that would fail.
_torchs_shutdown: Final = ProcessGroup.shutdown
_torchs_abort: Final = ProcessGroup.abort


def _of(group: ProcessGroup) -> list[RegisteredMemory]:
    return [memory for memory in _alive if memory.group is group]


def _shutdown(group: ProcessGroup) -> None:
    """Take the place of ``ProcessGroup.shutdown``, which ``destroy_process_group`` calls."""
    for memory in _of(group):
        memory.deregister()
    deregister_freed()
    _torchs_shutdown(group)


def _abort(group: ProcessGroup) -> None:
    """Take the place of ``ProcessGroup.abort``, which deregisters memory itself, and must not
    wait."""
    for memory in _of(group):
        memory.forget()
    _freed[:] = [each for each in _freed if each[0] is not group._get_backend(each[2])]
    _torchs_abort(group)
