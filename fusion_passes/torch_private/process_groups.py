"""Private names of process groups, and their collectives, called as DDP's own reducer calls them:
without the checks and records of ``torch.distributed``'s functions, which take longer than the
collective's own call."""

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
"""The class of a work's future. The public class, torch.futures.Future, is derived from it."""


# --- Groups --------------------------------------------------------------------------------------


def group_timeout(group: ProcessGroup) -> timedelta:
    """The timeout of a group's collectives, which has no public name. A backend that does not tell
    its timeout is assumed to have torch's default."""
    try:
        options: Any = group._get_backend(group._device_types[0]).options
        return timedelta(seconds=options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return default_pg_timeout


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for a device: ``"gloo"``, ``"nccl"``."""
    return str(group._get_backend(device).name())


# In a traced graph, a second name of a process group tells to which DDP module, and to which of its
# parameters, an all-reduce belongs. Groups are resolved by name when the graph runs.
register_process_group: Final[Any] = dist.distributed_c10d._register_process_group
unregister_process_group: Final[Any] = dist.distributed_c10d._unregister_process_group


# --- Collectives ---------------------------------------------------------------------------------


def begin_all_reduce(group: Any, tensor: Tensor, operation: Any) -> Callable[[], Any]:
    """Launch an all-reduce, in place. Return the function that waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return group.allreduce([tensor], options).wait


def begin_all_reduce_coalesced(
    group: Any, tensors: Sequence[Tensor], operation: Any
) -> Callable[[], Any]:
    """Launch an all-reduce of several tensors, in place, by one collective. Return the function
    that waits for it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    return group.allreduce_coalesced(list(tensors), options).wait


GRADIENTS: Final = 0x5F05
"""Tag of messages between two ranks. They are received in the order in which they are sent; a user
has probably not sent others with this tag."""

PARAMETERS: Final = 0x5F06
"""The same for what owners send after a step: if a rank leaves out a step, the gradients that it
sends next must not be received as parameters."""


def begin_exchange(
    group: Any,
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    tag: int,
) -> Callable[[], Any]:
    """Send each tensor to a rank, and receive one from a rank into each. Between two ranks, those
    of one tag keep their order. Return the function that waits for all. Over Gloo, this keeps the
    network busy in both directions, and needs less CPU than its collectives
    (docs/sharded_optimizer.md)."""
    works = [group.recv([tensor], rank, tag) for rank, tensor in received]
    works += [group.send([tensor], rank, tag) for rank, tensor in sent]

    def wait() -> None:
        timeout = group_timeout(group)  # Else it would be the timeout that the group was made with.
        for work in works:
            work.wait(timeout)

    return wait


def begin_reduces(
    group: Any, parts: Sequence[Tensor], memory: Tensor, operation: Any
) -> Callable[[], Any]:
    """Reduce the r-th part of a flat tensor to rank r, in place, over NCCL. Elsewhere the part is
    undefined afterwards. Return the function that waits for all."""
    if len({part.numel() for part in parts}) == 1:
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation
        return group._reduce_scatter_base(parts[group.rank()], memory, options).wait
    group._start_coalescing(memory.device)
    for rank, part in enumerate(parts):
        if part.numel():
            reduce = dist.ReduceOptions()
            reduce.reduceOp, reduce.rootRank = operation, rank
            group.reduce([part], reduce)
    return group._end_coalescing(memory.device).wait


def begin_grouped_broadcasts(
    group: Any, tensors: Sequence[tuple[int, Tensor]], device: torch.device
) -> Callable[[], Any]:
    """Launch broadcasts in place over NCCL, each from a rank, as one group. Return the function
    that waits for all."""
    group._start_coalescing(device)
    for rank, tensor in tensors:
        options = dist.BroadcastOptions()
        options.rootRank = rank
        group.broadcast([tensor], options)
    return group._end_coalescing(device).wait


def all_gather(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """Gather the tensors of all ranks of a group, one behind the other, and wait for that."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    group._allgather_base(gathered, tensor).wait()
    return gathered


def broadcast_first(group: Any, tensor: Tensor) -> None:
    """Broadcast the tensor of a group's first rank, in place, and wait for that."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def seen_by_autograd() -> Any:
    """A context in which writes bump the version counters of tensors, as they do when no compiled
    graph runs. A compiled graph can run with that switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)
