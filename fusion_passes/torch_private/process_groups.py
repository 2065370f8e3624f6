"""Private names of process groups, and their collectives, called as DDP's own reducer calls them:
without the checks and records of ``torch.distributed``'s functions, which take longer than the
call. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# What a work's future is: torch.futures.Future, the public one, is derived from it.
from torch._C import Future

# A second name for a group says in the graph to which DDP module, and to which of its
# parameters, a reduction belongs. Groups are resolved by name when the graph runs.
from torch.distributed.distributed_c10d import _register_process_group, _unregister_process_group

from fusion_passes.torch_private import ProcessGroup

AnyFuture: TypeAlias = Future
"""The class of all futures of torch."""


# --- Groups --------------------------------------------------------------------------------------


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long a collective of the group may take; it has no public name."""
    options: Any = group._get_backend(group._device_types[0]).options
    return timedelta(seconds=options._timeout.total_seconds())


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the group's backend for a device: ``"gloo"``, ``"nccl"``."""
    return str(group._get_backend(device).name())


def register_process_group(name: str, group: ProcessGroup) -> None:
    """Give ``group`` one more name, by which compiled graphs can call it."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def unregister_process_group(name: str) -> None:
    """Take a name away again."""
    _unregister_process_group(name)  # type: ignore[arg-type]


# --- Collectives ---------------------------------------------------------------------------------


def begin_all_reduce(group: Any, tensor: Tensor, operation: Any) -> Callable[[], Any]:
    """Begin an all-reduce, in place; what is returned waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    wait: Callable[[], Any] = group.allreduce([tensor], options).wait
    return wait


def begin_all_reduce_coalesced(
    group: Any, tensors: Sequence[Tensor], operation: Any
) -> Callable[[], Any]:
    """As :func:`begin_all_reduce`, for several tensors by one collective."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    wait: Callable[[], Any] = group.allreduce_coalesced(list(tensors), options).wait
    return wait


def all_gather(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """The tensors of all ranks of a group, one behind the other, waited for."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    group._allgather_base(gathered, tensor).wait()
    return gathered


def broadcast_first(group: Any, tensor: Tensor) -> None:
    """Give all ranks of a group the tensor of its first one, in place; wait for it."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def seen_by_autograd() -> Any:
    """A context in which tensors count what is written to them, as where no graph runs: a compiled
    graph can run where they do not."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)
