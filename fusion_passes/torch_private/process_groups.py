"""Private names of process groups, and their collectives, called as DDP's own reducer calls them:
without the checks and records of ``torch.distributed``'s functions, which take longer than the
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fusion_passes.torch_private import ProcessGroup

AnyFuture: Final = torch._C.Future
"""What a work's future is: torch.futures.Future, the public class, is derived from it."""


# --- Groups --------------------------------------------------------------------------------------


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long a collective of the group may take; it has no public name. A backend that does not
    tell is taken to have torch's default."""
    try:
        options: Any = group._get_backend(group._device_types[0]).options
        return timedelta(seconds=options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return default_pg_timeout


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the group's backend for a device: ``"gloo"``, ``"nccl"``."""
    return str(group._get_backend(device).name())


# A second name for a group says in a graph to which DDP module, and to which of its parameters, a
# reduction belongs. Groups are resolved by name when the graph runs.
register_process_group: Final[Any] = dist.distributed_c10d._register_process_group
unregister_process_group: Final[Any] = dist.distributed_c10d._unregister_process_group


# --- Collectives ---------------------------------------------------------------------------------


def begin_all_reduce(group: Any, tensor: Tensor, operation: Any) -> Callable[[], Any]:
    """Begin an all-reduce, in place; what is returned waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return group.allreduce([tensor], options).wait


def begin_all_reduce_coalesced(
    group: Any, tensors: Sequence[Tensor], operation: Any
) -> Callable[[], Any]:
    """As :func:`begin_all_reduce`, for several tensors by one collective."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    return group.allreduce_coalesced(list(tensors), options).wait


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
